"""ruff and mypy, with the one configuration in pyproject.toml, are part of the tests."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def check(*command: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, f"\n{result.stdout}{result.stderr}"


def test_ruff_finds_nothing():
    check("ruff", "check", "--output-format=concise")


@pytest.mark.timeout(900)  # mypy reads all of torch when its cache is cold
def test_mypy_strict_finds_nothing():
    check("mypy", "--strict", "-p", "dcpc")
