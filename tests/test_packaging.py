"""The wheel has all of dcpc/ and nothing else, and says what the project file and dcpc say."""

import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import dcpc

ROOT = Path(__file__).parent.parent
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
BESIDE = ("pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    pytest.importorskip("setuptools", "77", reason="the wheel's builder is not installed")
    tree = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "dcpc", tree / "dcpc", ignore=shutil.ignore_patterns("__pycache__"))
    for name in BESIDE:
        shutil.copy(ROOT / name, tree)
    (tree / "tests").mkdir()
    (tree / "tests" / "__init__.py").touch()
    command = [sys.executable, "-c", BUILD, str(tree / "dist")]
    subprocess.run(command, cwd=tree, check=True, capture_output=True, timeout=100)
    (file,) = (tree / "dist").glob("*.whl")
    assert file.name == f"dcpc-{dcpc.__version__}-py3-none-any.whl"
    return zipfile.ZipFile(file)


def test_wheel_has_the_package_alone(wheel):
    names = {n for n in wheel.namelist() if ".dist-info/" not in n}
    files = [f for suffix in ("py", "yaml", "typed") for f in ROOT.glob(f"dcpc/**/*.{suffix}")]
    assert names == {str(f.relative_to(ROOT)) for f in files}
    assert {"dcpc/py.typed", "dcpc/passes/sharding/sharding_rules.yaml"} < names


def test_wheel_says_what_it_needs(wheel):
    read = {Path(n).name: wheel.read(n).decode() for n in wheel.namelist() if ".dist-info/" in n}
    told = Parser().parsestr(read["METADATA"])
    assert told["Version"] == dcpc.__version__
    assert told["Requires-Python"] == ">=3.11"
    assert {"plots", "hf", "log", "flash"} <= {*told.get_all("Provides-Extra", [])}
    python = {c.rsplit(" ", 1)[1] for c in told.get_all("Classifier", []) if ":: Python ::" in c}
    assert python == {"3.11", "3.12", "3.13"}
    assert "dcpc = dcpc.commands.cli:app" in read["entry_points.txt"]


def test_changes_have_a_heading_for_the_version():
    assert f"\n## {dcpc.__version__}" in (ROOT / "CHANGELOG.md").read_text()
