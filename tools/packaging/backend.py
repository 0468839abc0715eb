"""Build backend: scikit-build-core, but it says at once when there is no torch to build against.

Without this, pip would first download torch with several gigabytes of CUDA, then fail in CMake.
"""

import subprocess
import sys

from scikit_build_core import build as _build
from scikit_build_core.build import *  # noqa: F403

_FIND = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"


def _need_torch() -> None:
    # -I: inside pip's build isolation this still finds the environment's own torch.
    if subprocess.call([sys.executable, "-I", "-c", _FIND]):
        raise SystemExit(
            "Jali is built against an installed torch >= 2.11, and this Python has none. "
            "Install it first, then repeat: pip install torch==2.13.0 "
            "(CPU only: add --index-url https://download.pytorch.org/whl/cpu)"
        )


def get_requires_for_build_wheel(config_settings=None):
    _need_torch()
    return _build.get_requires_for_build_wheel(config_settings)


def get_requires_for_build_editable(config_settings=None):
    _need_torch()
    return _build.get_requires_for_build_editable(config_settings)
