"""JALI_NVTX: calls are marked for profilers."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import jali
import pytest
import torch


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}], ids=["mask alone", "softcap"])
def test_a_marked_operator_runs_inside_its_range(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    @contextmanager
    def mark(name: str):
        seen.append(name)
        yield
        seen.append("end")

    monkeypatch.setattr(torch.cuda.nvtx, "range", mark)
    for operator in ("_forward", "_backward", "_masked_forward", "_masked_backward"):
        name = operator.split("_")[-1]
        marked = jali._ops._marked(name, getattr(jali._ops, operator))
        monkeypatch.setattr(jali._ops, operator, marked)
    q, k, v = (torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(3))
    out = jali.attention(q, k, v, jali.CausalMask(), **options)
    assert seen == ["forward", "end"]
    out.sum().backward()
    assert seen == ["forward", "end", "backward", "end"]
    want = jali.reference.attention(q, k, v, jali.CausalMask(), **options)
    torch.testing.assert_close(out, want)
