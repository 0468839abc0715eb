"""The wheel: one for every Python, whole, and usable from a folder of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("JALI_BUILD_DIR", ROOT / "build"))
USE = """
import torch, jali
q = torch.randn(1, 2, 9, 4)
out = jali.attention(q, q, q, jali.CausalMask())
torch.testing.assert_close(out[:, :, 0], q[:, :, 0])
print(jali.__file__)
"""


def run(*command: str | Path, **env: str) -> str:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JALI_", "PYTHONPATH"))}
    done = subprocess.run(
        [str(c) for c in command],
        capture_output=True,
        text=True,
        timeout=600,
        env={**kept, **env},
        cwd=env.get("PYTHONPATH", ROOT),
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.serial  # it uses the developer's build folder, so as not to compile all anew
def test_wheel_installs_and_works(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip"]
    build = ["wheel", "--no-build-isolation", "--no-deps", "-C", f"build-dir={BUILD}"]
    run(*pip, *build, "-w", tmp_path, ROOT)
    wheels = list(tmp_path.glob("*.whl"))
    assert [w.name.split("-", 2)[2] for w in wheels] == ["py3-none-linux_x86_64.whl"]
    target = tmp_path / "installed"
    run(*pip, "install", "--no-index", "--no-deps", "--target", target, wheels[0])
    where = run(sys.executable, "-c", USE, PYTHONPATH=str(target))
    assert Path(where.strip()).parent == target / "jali"
