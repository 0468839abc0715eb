"""A small forward and backward of every kind of kernel, for ./dev gpu-sanitize."""

from __future__ import annotations

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
    grads = torch.autograd.grad(out, [*given, *learned], torch.ones_like(out))
    if not all(bool(x.cpu().isfinite().all()) for x in (out, *grads)):
        raise RuntimeError(f"{name}: something is not finite")
    print(f"{name}: done", flush=True)


def main() -> None:
    causal = jali.CausalMask()
    ids = (torch.arange(200) // 70).int()[None]
    documents = causal & jali.DocumentMask(ids)
    for D in (64, 128, 256):
        both(f"dense D{D}", tensors(D))
        both(f"causal documents D{D}", tensors(D), documents)
    both("window", tensors(128), causal & jali.WindowMask.last(50))
    both("grouped heads, keys that nobody sees", tensors(64, Hkv=2), jali.PrefixMask(3))
    both("dense mask", tensors(128), jali.DenseMask(torch.ones(200, 200, dtype=torch.bool).tril()))
    blocks = torch.eye(4, dtype=torch.bool)[None, None]
    both("blocks", tensors(128), jali.BlockSparseMask(blocks, block=(64, 64)))
    both("predicate", tensors(128), jali.PredicateMask(lambda b, h, q, k: (q * 7 + k) % 5 != 0))
    both("deterministic", tensors(128), documents, deterministic=True)
    generator = torch.Generator().manual_seed(0)

    def learned(*shape: int) -> torch.Tensor:
        made = torch.randn(*shape, generator=generator).to("cuda", torch.bfloat16)
        return made.requires_grad_()

    both("softcap", tensors(128), causal, softcap=20.0)
    both("dropout", tensors(128), causal, dropout_p=0.2, seed=1)
    both("key_bias, sinks", tensors(128), causal, key_bias=learned(1, 2, 200), sinks=learned(2))
    both("bias", tensors(128), causal, bias=learned(1, 2, 200, 200))
    both("ALiBi", tensors(128), causal, alibi_slopes=torch.tensor([0.1, 0.2], device="cuda"))
    cu = torch.tensor([0, 90, 90, 200], dtype=torch.int32, device="cuda")
    q, k, v = (x[0].transpose(0, 1) for x in tensors(64))
    out = jali.attention_varlen(q, k, v, cu, cu, causal)
    torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    print("packed: done", flush=True)


if __name__ == "__main__":
    main()
