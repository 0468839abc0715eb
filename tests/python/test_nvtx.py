"""JALI_NVTX: calls are marked for profilers."""

from __future__ import annotations

from contextlib import contextmanager

import jali
import pytest
import torch


def test_a_marked_operator_runs_inside_its_range(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    @contextmanager
    def mark(name: str):
        seen.append(name)
        yield
        seen.append("end")

    monkeypatch.setattr(torch.cuda.nvtx, "range", mark)
    monkeypatch.setattr(jali._ops, "_forward", jali._ops._marked("forward", jali._ops._forward))
    monkeypatch.setattr(jali._ops, "_backward", jali._ops._marked("backward", jali._ops._backward))
    q, k, v = (torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(3))
    out = jali.attention(q, k, v, jali.CausalMask())
    assert seen == ["forward", "end"]
    out.sum().backward()
    assert seen == ["forward", "end", "backward", "end"]
    torch.testing.assert_close(out, jali.reference.attention(q, k, v, jali.CausalMask()))
