"""A small forward and backward of every kind of kernel, for ./dev gpu-sanitize."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jali
import torch


def tensors(D: int, L: int = 200, Hkv: int = 1) -> list[torch.Tensor]:
    """q, k, v of one sequence and two query heads."""
    generator = torch.Generator().manual_seed(D + L)
    return [
        torch.randn(1, h, L, D, generator=generator).to("cuda", torch.bfloat16).requires_grad_()
        for h in (2, Hkv, Hkv)
    ]


def both(name: str, given: list[torch.Tensor], mask: Any = None, **options: Any) -> None:
    """A call and its gradients, all of which must be finite."""
    if mask is not None:
        mask = mask.to("cuda")
    out = jali.attention(*given, mask, **options)
    learned = [x for x in options.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    # create_graph: small gradients share an allocation else, and each must end where it ends.
    grads = torch.autograd.grad(out, [*given, *learned], torch.ones_like(out), create_graph=True)
    if not all(bool(x.cpu().isfinite().all()) for x in (out, *grads)):
        raise RuntimeError(f"{name}: something is not finite")
    print(f"{name}: done", flush=True)


def learned(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(*shape, generator=generator).to("cuda", torch.bfloat16).requires_grad_()


def packed() -> None:
    cu = torch.tensor([0, 90, 90, 200], dtype=torch.int32, device="cuda")
    q, k, v = (x[0].transpose(0, 1) for x in tensors(64))
    out = jali.attention_varlen(q, k, v, cu, cu, jali.CausalMask())
    torch.autograd.grad(out, (q, k, v), torch.ones_like(out), create_graph=True)
    print("packed: done", flush=True)


def calls() -> dict[str, Callable[[], None]]:
    causal = jali.CausalMask()
    ids = (torch.arange(200) // 70).int()[None]
    documents = causal & jali.DocumentMask(ids)
    blocks = torch.eye(4, dtype=torch.bool)[None, None]
    of_d128: dict[str, tuple[Any, Callable[[], dict[str, Any]]]] = {
        "window": (causal & jali.WindowMask.last(50), dict),
        "dense mask": (jali.DenseMask(torch.ones(200, 200, dtype=torch.bool).tril()), dict),
        "blocks": (jali.BlockSparseMask(blocks, block=(64, 64)), dict),
        "predicate": (jali.PredicateMask(lambda b, h, q, k: (q * 7 + k) % 5 != 0), dict),
        "deterministic": (documents, lambda: {"deterministic": True}),
        "deterministic, causal": (causal, lambda: {"deterministic": True}),
        "softcap": (causal, lambda: {"softcap": 20.0}),
        "dropout": (causal, lambda: {"dropout_p": 0.2, "seed": 1}),
        "key_bias, sinks": (
            causal,
            lambda: {"key_bias": learned(1, 2, 200), "sinks": learned(2)},
        ),
        "bias": (causal, lambda: {"bias": learned(1, 2, 200, 200)}),
        "ALiBi": (causal, lambda: {"alibi_slopes": torch.tensor([0.1, 0.2], device="cuda")}),
    }

    def of(
        name: str, D: int, mask: Any, options: Callable[[], dict[str, Any]] = dict, **shape: int
    ):
        return lambda: both(name, tensors(D, **shape), mask, **options())

    found: dict[str, Callable[[], None]] = {"packed": packed}
    for D in (64, 128, 192, 256):
        for name, mask in {"dense": None, "causal documents": documents}.items():
            found[f"{name} D{D}"] = of(f"{name} D{D}", D, mask)
    for name, (mask, options) in of_d128.items():
        found[name] = of(name, 128, mask, options)
    for name in ("softcap", "dropout", "key_bias, sinks", "bias"):
        mask, options = of_d128[name]
        found[f"{name} D64"] = of(f"{name} D64", 64, mask, options)
    # In tiles of their own.
    packed_documents = causal & jali.DocumentMask.from_lengths([300, 0])
    name = "packed documents"
    found[name] = of(name, 128, packed_documents, L=600)
    name = "packed documents, deterministic"
    found[name] = of(name, 128, packed_documents, lambda: {"deterministic": True}, L=600)
    # Scores so far apart that the forward makes them again (guess_weights).
    found["scores made again"] = of("scores made again", 128, None, lambda: {"scale": 40.0}, Hkv=2)
    name = "scores made again, softcap"  # capped_weights
    found[name] = of(name, 128, None, lambda: {"scale": 40.0, "softcap": 20.0}, Hkv=2)
    name = "grouped heads, keys that nobody sees"
    found[name] = of(name, 64, jali.PrefixMask(3), Hkv=2)
    return found


def let_go() -> None:
    """What autograd's thread ran last, Python objects among it, it lets go of beside this one; a
    process that ends meanwhile is terminated. So its last task is one without."""
    x = torch.ones(1, device="cuda", requires_grad=True)
    x.exp().backward()


def in_processes(names: Iterable[str], count: int) -> int:
    """Each call in a process of its own, `count` at a time: how a cold cache is filled fast."""

    def status(name: str) -> int:
        return subprocess.call([sys.executable, __file__, name])

    with ThreadPoolExecutor(count) as pool:
        return max(pool.map(status, names))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of calls; default: all")
    parser.add_argument("--processes", type=int, default=0, help="so many calls at a time")
    parser.add_argument("--share", default="1/1", help="n/m: every m-th of them from the n-th on")
    parser.add_argument("--fill", action="store_true", help="what torch.empty gives with NaN")
    arguments = parser.parse_args()
    if arguments.fill:
        torch.use_deterministic_algorithms(True, warn_only=True)  # so PyTorch does
    all_calls = calls()
    first, step = map(int, arguments.share.split("/"))
    names = (arguments.names or list(all_calls))[first - 1 :: step]
    if arguments.processes:
        return in_processes(names, arguments.processes)
    for name in names:
        all_calls[name]()
    let_go()
    return 0


if __name__ == "__main__":
    sys.exit(main())
