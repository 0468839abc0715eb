"""What a benchmark found: printed as it comes, kept for the JSON file, compared with goals."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

import jali


@dataclass(frozen=True)
class Result:
    """One measured number, with its goal where there is one."""

    section: str
    case: str
    value: float
    unit: str
    goal: float | None = None
    at_most: bool = False  # the goal is an upper bound
    detail: dict[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool | None:
        if self.goal is None:
            return None
        return self.value <= self.goal if self.at_most else self.value >= self.goal

    def mark(self) -> str:
        """The goal and whether it is met, as printed behind the number."""
        if self.goal is None:
            return ""
        sign = "≤" if self.at_most else "≥"
        return f"{sign} {self.goal:g} {'✓' if self.passed else '✗'}"


@dataclass
class Report:
    """All results of a run."""

    results: list[Result] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, result: Result) -> Result:
        self.results.append(result)
        return result

    def note(self, text: str) -> None:
        """Prints a sentence and keeps it."""
        self.notes.append(text)
        print(text, flush=True)

    def summary(self) -> str:
        """How many goals are met, and those that are not."""
        missed = [r for r in self.results if r.passed is False]
        num = sum(r.passed is not None for r in self.results)
        lines = [f"{num - len(missed)} of {num} goals met"]
        lines += [f"  ✗ {r.section}, {r.case}: {r.value:.3g} {r.unit} ({r.mark()})" for r in missed]
        return "\n".join(lines)

    def markdown(self) -> str:
        """All results as one table."""
        lines = ["| | case | measured | goal |", "|---|---|--:|---|"]
        for r in self.results:
            lines.append(f"| {r.section} | {r.case} | {r.value:.3g} {r.unit} | {r.mark()} |")
        return "\n".join(lines) + "\n"

    def save(self, path: Path) -> None:
        """Writes everything as JSON, and the table beside it as Markdown."""
        path.parent.mkdir(parents=True, exist_ok=True)
        results = [{**asdict(r), "passed": r.passed} for r in self.results]
        body = {"machine": machine(), "results": results, "notes": self.notes}
        path.write_text(json.dumps(body, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        path.with_suffix(".md").write_text(self.markdown(), encoding="utf-8")


def cpu_flags() -> set[str]:
    """Instruction sets that the processor names (Linux)."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text(encoding="utf-8").splitlines() if info.exists() else ():
        if line.startswith("flags"):
            return set(line.split(":", 1)[1].split())
    return set()


def machine() -> dict[str, object]:
    """What the numbers depend on."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    for line in info.read_text(encoding="utf-8").splitlines() if info.exists() else ():
        if line.startswith("model name"):
            name = line.split(":", 1)[1].strip()
            break
    flags = cpu_flags()
    return {
        "cpu": name,
        "isa": [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f in flags],
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "threads": torch.get_num_threads(),
        "jali": jali.__version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "force": os.environ.get("JALI_FORCE", ""),
    }
