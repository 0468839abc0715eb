"""./dev: set up, demo, test, bench, build, lint. `./dev help` lists the commands."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as xml
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import ClassVar

import dev_setup
from dev_setup import BUILD, PYTHON, ROOT, VENV, fail, run, run_python

COMMANDS: dict[str, tuple[str, str, Callable[[list[str]], int]]] = {}


def command(usage: str, text: str) -> Callable:
    def keep(function: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
        COMMANDS[function.__name__.replace("_", "-")] = (usage, text, function)
        return function

    return keep


def ready(*targets: str, tools: bool = False) -> None:
    dev_setup.compiler()  # says what is missing before anything is installed
    with dev_setup.alone():
        dev_setup.install(tools)
        dev_setup.build(*targets)


@command("[--quick]", "what Jali does, on real text, in pictures and numbers")
def demo(arguments: list[str]) -> int:
    ready("jali_torch")
    # Threads of torch that wait by spinning bring a machine that is not idle to a stop: 2 steps of
    # training in 5 s instead of 20. An idle one loses some percent.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    return run_python("-m", "jali.demo", *arguments)


@command("[path …] [-k …]", "all tests, or those of files and folders (C++ and Python)")
def test(arguments: list[str]) -> int:
    tally = Tally("test")
    paths = [a for a in arguments if not a.startswith("-") and Path(a.split("::")[0]).exists()]
    extra = [a for a in arguments if a not in paths]
    everything = not arguments
    programs = test_programs(paths or (["tests"] if not extra else []))
    targets = ["all"] if everything else [f"test_{p.replace('/', '_')}" for p in programs]
    if extra or any(is_python_test(p) for p in paths):
        targets += ["jali", "jali_torch"]
    ready(*targets, tools=True)
    if programs:
        tally.add("C++ tests", *run_programs(programs, BUILD))
    if everything:
        tally.add("NVRTC kernels", *run_nvrtc())
    if extra or not paths or any(is_python_test(p) for p in paths):
        tally.add(
            "Python tests", *run_pytest([p for p in paths if is_python_test(p)] or ["tests"], extra)
        )
    return tally.close()


@command("cpu|gpu …", "measure against torch on this machine (gpu: python3's torch, as gpu-test)")
def bench(arguments: list[str]) -> int:
    if arguments[:1] == ["gpu"]:
        return run_gpu_python("-m", "jali.bench", *arguments)
    ready("jali_torch")
    return run_python("-m", "jali.bench", *arguments)


@command("", "compile library, operators and tests")
def build(arguments: list[str]) -> int:
    ready(*arguments)
    return 0


@command("", "format C++ and Python")
def fmt(arguments: list[str]) -> int:
    with dev_setup.alone():
        dev_setup.install(tools=True)
    status = run([VENV / "bin" / "clang-format", "-i", *cpp_files()])
    status |= run([VENV / "bin" / "ruff", "check", "-q", "--fix-only", "."])
    return status | run([VENV / "bin" / "ruff", "format", "."])


@command("", "formatting, ruff, mypy, who includes whom")
def lint(arguments: list[str]) -> int:
    with dev_setup.alone():
        dev_setup.install(tools=True)
    bin_dir = VENV / "bin"
    checks: dict[str, list[str | Path]] = {
        "clang-format": [bin_dir / "clang-format", "--dry-run", "-Werror", *cpp_files()],
        "ruff check": [bin_dir / "ruff", "check", "-q", "."],
        "ruff format": [bin_dir / "ruff", "format", "--check", "-q", "."],
        "mypy": [bin_dir / "mypy"],
        "includes": [PYTHON, "tools/check_includes.py"],
    }
    tally = Tally("lint")
    failed = 0
    for name, line in checks.items():
        status = dev_setup.quietly(line)
        print(f"  {name:14} {'FAILED' if status else 'ok'}", flush=True)
        failed += 1 if status else 0
    tally.add("checks", len(checks) - failed, failed)
    if failed:
        print("Formatting is mended by ./dev fmt.")
    return tally.close()


@command("", "mask leaves and classes, backends, instruction sets, JALI_* variables")
def list_(arguments: list[str]) -> int:
    ready("jali_torch")
    return run_python("-m", "jali", "list") or run_python("-m", "jali", "info")


@command('"causal & document L=4096 D=64"', "what the library would choose for a problem, and why")
def why(arguments: list[str]) -> int:
    ready("jali_torch")
    words = " ".join(arguments).split()
    sizes = [w for w in words if re.fullmatch(r"\w+=\w+", w)]
    mask = " ".join(w for w in words if w not in sizes)
    return run_python("-m", "jali", "why", mask, *sizes)


@command(
    "[name | 'BACKWARD(…)' …]", "GPU kernels: registers, bytes and seconds of compiling; no GPU"
)
def kernels(arguments: list[str]) -> int:
    with dev_setup.alone():
        dev_setup.install(tools=True)
    return run_python("tools/nvrtc_check.py", *arguments)


@command("[address|thread]", "C++ tests under ASan + UBSan (default) or TSan")
def sanitize(arguments: list[str]) -> int:
    kind = arguments[0] if arguments else "address"
    if kind not in ("address", "thread"):
        fail(f"sanitize knows 'address' and 'thread', not '{kind}'")
    tally = Tally(f"sanitize {kind}")
    folder = BUILD / kind
    with dev_setup.alone():
        dev_setup.install(tools=False)
        dev_setup.build(
            folder=folder,
            options=[f"-DJALI_SANITIZE={kind}", "-DJALI_TORCH=OFF", "-DJALI_TESTS=ON"],
        )
    tally.add("C++ tests", *run_programs(test_programs(["tests"]), folder))
    return tally.close()


@command("", "what every change must pass: lint, test, sanitize address")
def ci(arguments: list[str]) -> int:
    begin = time.perf_counter()
    status = 0
    for name in ("lint", "test", "sanitize"):
        print(f"=== ./dev {name}", flush=True)
        status |= COMMANDS[name][2]([])
    print("\nci:")
    for tally in Tally.closed:
        print(f"  {tally.line()}")
    passed, failed = (sum(getattr(t, n) for t in Tally.closed) for n in ("passed", "failed"))
    print(f"ci: {passed} passed, {failed} failed in {time.perf_counter() - begin:.0f} s")
    return status


def gpu_environment() -> dict[str, str]:
    """For python3 with the library that was built; fails where it sees no GPU."""
    library = os.environ.get("JALI_LIBRARY", str(BUILD / "libjali_torch.so"))
    if not Path(library).exists():
        fail(f"{library} is missing: run ./dev build (here or on a machine with network) first")
    found = subprocess.run(
        ["python3", "-c", "import torch; print(torch.cuda.is_available())"],
        capture_output=True,
        text=True,
    )
    if found.stdout.strip() != "True":
        fail(f"python3 has no torch that sees a GPU:\n{found.stdout}{found.stderr}")
    return {**os.environ, "PYTHONPATH": str(ROOT / "python"), "JALI_LIBRARY": library}


def run_gpu_python(*arguments: str) -> int:
    return subprocess.call(["python3", *arguments], cwd=ROOT, env=gpu_environment())


@command("[pytest arguments]", "tests/gpu with python3 (its torch needs CUDA, and pytest-xdist)")
def gpu_test(arguments: list[str]) -> int:
    env = gpu_environment()
    env.setdefault("OMP_NUM_THREADS", "1")  # the workers share the cores
    # Compiling is most of the work: one worker a core.
    workers = [] if any(a.startswith("-n") for a in arguments) else ["-n", str(os.cpu_count() or 1)]
    paths = [] if any(Path(a.split("::")[0]).exists() for a in arguments) else ["tests/gpu"]
    os.chdir(ROOT)
    # In place of this process: who ends it ends the tests, too.
    os.execvpe("python3", ["python3", "-m", "pytest", "-q", *workers, *paths, *arguments], env)


# NOTE: not racecheck. What it reports are accesses that mbarriers order: of cells, notes and
# statistics, for which one lane of a warp arrives for all, after __syncwarp, which leaves no
# instruction where the warp is converged, so that the tool seems to see the other lanes' accesses
# as unordered; and BackwardTiles::Notes::wanted, a hint that may be old.
SANITIZERS = ("memcheck", "initcheck", "synccheck")
# The barriers that racecheck and synccheck follow in a block: those that they count in a kernel
# are fewer, since instructions that make them stand in loops.
NUM_BARRIERS = ("--num-cuda-barriers", "64")


@command("[tool …]", "compute-sanitizer on small calls of every kind of kernel")
def gpu_sanitize(arguments: list[str]) -> int:
    # Without PyTorch's cache every tensor is an allocation of its own, with bounds of its own.
    env = {**gpu_environment(), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    calls = ["python3", "tests/gpu/small_calls.py"]
    tally = Tally("gpu-sanitize")
    # The kernels are compiled first, and once.
    at_a_time = str(os.cpu_count() or 1)
    status = subprocess.call([*calls, "--processes", at_a_time], cwd=ROOT, env=env)
    tally.add("without a tool", int(status == 0), int(status != 0))
    if status:
        return tally.close()

    folder = ROOT / "out/sanitize"  # what a tool has said so far, also if it is cut off
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

    tools = arguments or list(SANITIZERS)
    shares = max(1, (os.cpu_count() or 1) // len(tools))  # of the calls: a process each

    def watched(tool: str, share: str) -> tuple[str, int]:
        barriers = NUM_BARRIERS if tool in ("racecheck", "synccheck") else ()
        watch = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *barriers]
        # initcheck does not see what the copy engine stores, so that it reports where a backward
        # reads `out`. Tensors are filled with NaN, then: the calls see whether one comes through.
        fill = ["--fill"] if tool == "initcheck" else []
        path = folder / f"{tool}.{share.replace('/', '-of-')}.log"
        with open(path, "w") as log:
            status = subprocess.call(
                [*watch, *calls, "--share", share, *fill],
                cwd=ROOT,
                env=env,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        seconds = time.perf_counter() - tally.begin
        return f"=== {tool} {share}, {seconds:.0f} s\n{path.read_text()}", status

    failed = dict.fromkeys(tools, 0)
    with ThreadPoolExecutor(len(tools) * shares) as pool:
        watching = {
            pool.submit(watched, tool, f"{n + 1}/{shares}"): tool
            for n in range(shares)
            for tool in tools
        }
        for done in as_completed(watching):
            said, status = done.result()
            print(said, flush=True)
            failed[watching[done]] += status != 0
    for tool, count in failed.items():
        tally.add(tool, int(not count), int(count > 0))
    return tally.close()


@command("OLD.so NEW.so …", "calls of several builds in turns: which is faster on a GPU")
def gpu_ab(arguments: list[str]) -> int:
    return run_gpu_python("tools/gpu_ab.py", *arguments)


class Tally:
    """Sums what ran, and says so in one closing line."""

    closed: ClassVar[list[Tally]] = []

    def __init__(self, name: str) -> None:
        self.name = name
        self.parts: list[str] = []
        self.passed = self.failed = 0
        self.begin = time.perf_counter()
        self.seconds = 0.0

    def add(self, name: str, passed: int, failed: int) -> None:
        self.parts.append(f"{passed} {name}" + (f" ({failed} FAILED)" if failed else ""))
        self.passed += passed
        self.failed += failed

    def line(self) -> str:
        return (
            f"{self.name}: {self.passed} passed, {self.failed} failed "
            f"({' + '.join(self.parts) or 'nothing ran'}) in {self.seconds:.0f} s"
        )

    def close(self) -> int:
        """Prints the line. A command that ran nothing has not passed."""
        self.seconds = time.perf_counter() - self.begin
        Tally.closed.append(self)
        print(f"\n{self.line()}", flush=True)
        return 1 if self.failed or not self.passed else 0


def tracked(*patterns: str) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "--deduplicate", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


def cpp_files() -> list[str]:
    return tracked("*.h", "*.cpp", "*.cu", "*.cuh")


def is_python_test(path: str) -> bool:
    plain = Path(path.split("::")[0])
    return plain.suffix == ".py" or (plain.is_dir() and any(plain.rglob("test_*.py")))


def test_programs(paths: Sequence[str]) -> list[str]:
    """Names, relative to tests/, of the C++ test programs at or under the paths."""
    wanted = [(ROOT / p).resolve() for p in paths]
    names = []
    for source in sorted((ROOT / "tests").rglob("*_test.cpp")):
        if any(source == w or w in source.parents for w in wanted):
            names.append(str(source.relative_to(ROOT / "tests").with_suffix("")))
    return names


def run_programs(names: Sequence[str], folder: Path) -> tuple[int, int]:
    """Runs C++ test programs; returns how many of their tests passed and failed."""

    def one(name: str) -> tuple[str, int, int]:
        begin = time.perf_counter()
        try:
            done = subprocess.run(
                [folder / "tests" / name],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=900,
                env={**dev_setup.environment(), "UBSAN_OPTIONS": "print_stacktrace=1"},
            )
            output, status = done.stdout, done.returncode
        except subprocess.TimeoutExpired as late:
            output, status = f"{late.stdout or ''}\ntook more than {late.timeout} s", 1
        closing = re.search(r"^(\d+) passed, (\d+) failed", output, re.MULTILINE)
        passed, failed = (int(closing[1]), int(closing[2])) if closing else (0, 0)
        if status and not failed:
            failed = 1  # it crashed, or a sanitizer stopped it
        line = closing.string[closing.start() :].splitlines()[0] if closing else f"exit {status}"
        print(f"  {name:36} {line}  {time.perf_counter() - begin:.1f} s", flush=True)
        return (output if status else ""), passed, failed

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(one, names))
    for output, _, _ in results:
        if output:
            print(output)
    return sum(r[1] for r in results), sum(r[2] for r in results)


def run_nvrtc() -> tuple[int, int]:
    done = subprocess.run(
        [PYTHON, "tools/nvrtc_check.py"],
        cwd=ROOT,
        env=dev_setup.environment(),
        capture_output=True,
        text=True,
    )
    print(done.stdout + done.stderr, flush=True)
    closing = re.search(r"^NVRTC .*: (\d+) passed, (\d+) failed", done.stdout, re.MULTILINE)
    return (int(closing[1]), int(closing[2])) if closing else (0, 1)


def run_pytest(paths: Sequence[str], extra: Sequence[str]) -> tuple[int, int]:
    """Runs pytest: first what may share the machine, on all cores, then what measures, alone."""
    passed = failed = 0
    many = any(Path(p).is_dir() for p in paths)  # workers take seconds to start
    workers = str(os.cpu_count() or 1) if many else "0"
    passes = [["-m", "not serial", "-n", workers], ["-m", "serial"]]
    if any(a == "-m" or a.startswith("-m=") for a in extra):
        passes = [[]]
    for number, selection in enumerate(passes):
        report = BUILD / f"pytest-{number}.xml"
        report.unlink(missing_ok=True)
        status = run_python(
            "-m", "pytest", "-q", f"--junitxml={report}", *selection, *extra, *paths
        )
        if status == 5:  # nothing selected
            continue
        if not report.exists():
            print(f"pytest ended with status {status} before it could report (negative: a signal)")
            failed += 1
            continue
        suite = xml.parse(report).getroot().find("testsuite")
        assert suite is not None
        bad = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        passed += int(suite.get("tests", 0)) - bad - int(suite.get("skipped", 0))
        failed += bad or (1 if status else 0)
    return passed, failed


def help_text() -> str:
    lines = ["usage: ./dev COMMAND …", ""]
    for name, (usage, text, _) in COMMANDS.items():
        lines.append(f"  {name.rstrip('-'):13}{usage:34} {text}")
    lines += [
        "",
        "The first call makes .venv in the checkout and installs torch and Jali in it (a minute).",
        "JALI_VENV names another virtual environment, CXX another compiler.",
    ]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    name = arguments[0] if arguments else "help"
    if name in ("help", "-h", "--help"):
        print(help_text())
        return 0
    entry = COMMANDS.get(name) or COMMANDS.get(f"{name}-")
    if entry is None:
        fail(f"there is no command '{name}'\n\n{help_text()}")
        raise AssertionError
    return entry[2](arguments[1:])


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
