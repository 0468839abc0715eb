"""The environment behind ./dev: a virtual environment, a build folder, and how to run in them.

Standard library only. A second call finds everything in place and costs a stamp file and a look of
ninja at the tree.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = Path(os.environ.get("JALI_VENV", ROOT / ".venv"))
BUILD = ROOT / "build"
PYTHON = VENV / "bin" / "python"

TORCH = "2.13.0"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
RUN_PACKAGES = ["numpy", "cmake>=3.20", "ninja"]
# Formatters and checkers are pinned: another version formats differently.
DEV_PACKAGES = [
    "pytest",
    "pytest-xdist",
    "hypothesis",
    "ruff==0.17.6",
    "mypy==2.4.1",
    "clang-format==23.1.5",
    "scikit-build-core>=0.11",
    "nvidia-cuda-nvrtc==13.0.88",
]


def say(text: str) -> None:
    print(f"\033[K\033[2m{text}\033[0m" if sys.stdout.isatty() else text, flush=True)


def fail(text: str) -> None:
    sys.exit(f"./dev: {text}")


def environment() -> dict[str, str]:
    """What every command runs in: this checkout's package and library, the environment's tools."""
    env = dict(os.environ)
    env["PATH"] = f"{VENV / 'bin'}{os.pathsep}{env.get('PATH', '')}"
    env["PYTHONPATH"] = str(ROOT / "python")
    env.setdefault("JALI_LIBRARY", str(BUILD / "libjali_torch.so"))
    env["JALI_BUILD_DIR"] = str(BUILD)
    env.setdefault("CXX", compiler())
    return env


def run(command: Sequence[str | Path], **more: object) -> int:
    """Runs a command in the environment; returns its exit status."""
    return subprocess.run([str(c) for c in command], cwd=ROOT, env=environment(), **more).returncode  # type: ignore[call-overload]


def run_python(*arguments: str) -> int:
    return run([PYTHON, *arguments])


def compiler() -> str:
    """A g++ >= 12 (or what CXX names)."""
    if "CXX" in os.environ:
        return os.environ["CXX"]
    found = []
    for name in ["g++", *(f"g++-{n}" for n in range(20, 11, -1))]:
        path = shutil.which(name)
        if path is None:
            continue
        asked = subprocess.run([path, "-dumpfullversion"], capture_output=True, text=True)
        version = asked.stdout.strip()
        found.append(f"{name} {version}")
        if re.match(r"\d+", version) and int(version.split(".")[0]) >= 12:
            return path
    fail(
        f"a C++20 compiler is needed: g++ >= 12 (found: {', '.join(found) or 'none'}). Install it, "
        "e.g. 'apt install g++', or name another compiler in CXX."
    )
    raise AssertionError


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Two ./dev at a time must not install or build at once."""
    BUILD.mkdir(exist_ok=True)
    with open(BUILD / "dev.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another ./dev that installs or builds …")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def pip(*arguments: str) -> str:
    """Installs quietly. Returns pip's output if it failed, else an empty text."""
    command = [PYTHON, "-m", "pip", "install", "-q", "--disable-pip-version-check", *arguments]
    done = subprocess.run([str(c) for c in command], cwd=ROOT, capture_output=True, text=True)
    return (done.stdout + done.stderr or "pip failed") if done.returncode else ""


def install_torch() -> None:
    """The CPU build where one is on offer; a bare torch would bring gigabytes of CUDA."""
    cpu = f"torch=={TORCH}+cpu"
    if pip(cpu) and pip(cpu, "--extra-index-url", TORCH_CPU_INDEX):
        error = pip(f"torch=={TORCH}")
        if error:
            fail(f"torch {TORCH} could not be installed:\n{error}")


def make_venv() -> None:
    if PYTHON.exists() and not subprocess.call([PYTHON, "-c", "import pip"]):
        return
    say(f"making {VENV.name} with Python {sys.version.split()[0]} …")
    # Run inside the old environment, venv would make one that points at itself.
    base = Path(getattr(sys, "_base_executable", sys.executable))
    done = subprocess.run(
        [base, "-m", "venv", "--clear", VENV], capture_output=True, text=True, check=False
    )
    if done.returncode:
        fail(
            f"python -m venv failed: {(done.stdout + done.stderr).strip()}\nOn Debian and Ubuntu: "
            "apt install python3-venv"
        )


def write_pth() -> None:
    """Makes `import jali` work in the checkout's own environment, outside ./dev too."""
    site = next(VENV.glob("lib/python3*/site-packages"))
    library = BUILD / "libjali_torch.so"
    (site / "jali_checkout.pth").write_text(
        f"{ROOT / 'python'}\nimport os; os.environ.setdefault('JALI_LIBRARY', {str(library)!r})\n"
    )


def install(tools: bool) -> None:
    """Brings the environment to the state that this file names. tools: those of developers too."""
    wanted = "\n".join([TORCH, *RUN_PACKAGES])
    steps = [("run", wanted)]
    if tools:
        steps.append(("dev", wanted + "\n".join(DEV_PACKAGES)))
    for name, text in steps:
        stamp = VENV / f"jali-{name}.stamp"
        mark = hashlib.sha256(f"{text}\n{ROOT}".encode()).hexdigest()
        if PYTHON.exists() and stamp.exists() and stamp.read_text() == mark:
            continue
        begin = time.perf_counter()
        make_venv()
        if name == "run":
            say(f"installing torch {TORCH} (CPU) and build tools, once …")
            install_torch()
            error = pip(*RUN_PACKAGES)
            if VENV.parent == ROOT:
                write_pth()
        else:
            say("installing test and lint tools, once …")
            error = pip(*DEV_PACKAGES)
        if error:
            fail(f"pip could not install what ./dev needs:\n{error}")
        stamp.write_text(mark)
        say(f"  done in {time.perf_counter() - begin:.0f} s")


def configure(folder: Path, options: Sequence[str]) -> None:
    """Runs CMake when the folder is new or the options are."""
    arguments = ["-G", "Ninja", f"-DPython_EXECUTABLE={PYTHON}", *options]
    arguments += [f"-DCMAKE_MAKE_PROGRAM={VENV / 'bin' / 'ninja'}"]
    mark = hashlib.sha256("\n".join([str(ROOT), *arguments]).encode()).hexdigest()
    stamp = folder / "configure.stamp"
    if (folder / "build.ninja").exists() and stamp.exists() and stamp.read_text() == mark:
        return
    # A folder that was made by another cmake, or elsewhere, is made anew.
    (folder / "CMakeCache.txt").unlink(missing_ok=True)
    if quietly([VENV / "bin" / "cmake", "-S", ".", "-B", folder, *arguments]):
        fail("CMake failed, see above")
    stamp.write_text(mark)


def build(*targets: str, folder: Path = BUILD, options: Sequence[str] = ()) -> None:
    """Compiles what changed; prints only where there is something to do or to complain about."""
    configure(folder, options or ["-DJALI_TORCH=ON", "-DJALI_TESTS=ON"])
    begin = time.perf_counter()
    log = []
    ninja = subprocess.Popen(
        [VENV / "bin" / "ninja", "-C", folder, *targets],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert ninja.stdout is not None
    working = False
    for line in ninja.stdout:
        log.append(line)
        if re.match(r"\[[1-9]", line):  # [0/n] only looks whether files came or went
            if not working:
                say(f"building {' '.join(targets) or folder.name} …")
            working = True
            if sys.stdout.isatty():
                print(f"\r\033[K{line.rstrip()[:100]}", end="\r", flush=True)
    if ninja.wait():
        print("".join(log))
        fail("the build failed, see above")
    if working:
        say(f"  built in {time.perf_counter() - begin:.0f} s")


def quietly(command: Sequence[str | Path]) -> int:
    """Runs a command and shows its output only if it fails."""
    done = subprocess.run(
        [str(c) for c in command], cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    if done.returncode:
        print(done.stdout + done.stderr, flush=True)
    return done.returncode
