"""The installed C++ library, used from projects outside the tree, without torch."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("JALI_BUILD_DIR", ROOT / "build"))


def run(*command: str | Path) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """libjali, its header and its CMake package, installed from the build folder."""
    assert (BUILD / "libjali.so").exists(), f"no library in {BUILD}: run ./dev build first"
    folder = tmp_path_factory.mktemp("prefix")
    run("cmake", "--install", BUILD, "--component", "cpp", "--prefix", folder)
    return folder


@pytest.mark.parametrize(
    "project, program",
    [("tests/consumer", "consumer"), ("examples/cpp", "packed_documents")],
)
def test_program_builds_and_runs(prefix: Path, tmp_path: Path, project: str, program: str) -> None:
    configure = ["cmake", "-S", ROOT / project, "-B", tmp_path, "-G", "Ninja"]
    run(*configure, f"-DCMAKE_PREFIX_PATH={prefix}", "-DCMAKE_BUILD_TYPE=Release")
    run("cmake", "--build", tmp_path)
    print(run(tmp_path / program))
    linked = run("ldd", tmp_path / program)
    assert "libjali.so" in linked
    assert "torch" not in linked


def test_only_the_public_api_is_exported() -> None:
    names = run("nm", "-DC", "--defined-only", BUILD / "libjali.so")
    assert "jali::attention_forward(" in names
    hidden = [name for name in names.splitlines() if "jali::MaskCursor" in name]
    assert not hidden, f"the library exports what jali.h does not declare: {hidden}"
