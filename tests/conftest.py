"""Shared by all Python tests: the `gpu` marker and the count of cases at the end of a run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `from tests.python import oracle`

# The oracle's small tensors: torch's threads spin for longer than they work, and pytest's workers
# share the cores. What compares Jali with the oracle gives Jali threads of its own.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def pytest_terminal_summary(terminalreporter) -> None:
    """Says how many conformance and property cases ran, over all workers, and of how many mask
    structures, where these count."""
    ran = [
        report
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        if report.when == "call"
    ]
    recorded = [entry for report in ran for entry in report.user_properties]
    counts = {
        "conformance cases": sum("tests/conformance/" in report.nodeid for report in ran),
        "property cases": sum(n for name, n in recorded if name == "cases"),
        "mask structures": sum(n for name, n in recorded if name == "structures"),
    }
    if any(counts.values()):
        terminalreporter.write_sep("-", "cases")
    for name, count in counts.items():
        if count:
            terminalreporter.write_line(f"{name + ':':18} {count:,}")
