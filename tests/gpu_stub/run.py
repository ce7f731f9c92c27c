"""`python -m tests.gpu_stub.run MODULE ...` runs a module on the GPU that computes nothing.

GPU_STUB_PYTHON=/path/to/python python -m tests.gpu_stub.run benchmarks.gpu_checks --no-numbers
"""

import os
import sys
from functools import cache
from pathlib import Path

from tests.gpu_stub.build import environment

ROOT = Path(__file__).parents[2]
VENV = ROOT / ".venv-torch2.14.1"
GIVEN = os.environ.get("GPU_STUB_PYTHON")
PYTHON = GIVEN or str(VENV / "bin" / "python")


def is_there() -> bool:
    """Returns whether the interpreter is there; an installation that was ended halfway is not."""
    return Path(PYTHON).exists() if GIVEN else (VENV / ".installed").exists()


@cache
def card() -> dict[str, str]:
    """Returns the environment in which torch sees the card; its libraries are built for it."""
    made = environment(PYTHON, ROOT / "build" / "gpu_stub")
    return made | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


if __name__ == "__main__":
    os.execve(PYTHON, [PYTHON, "-m", *sys.argv[1:]], card())
