"""The repository holds text, small files and a few pictures: no wheel, no data, no build output."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MOST_BYTES = 300_000
PICTURES = Path("docs/images")  # the one folder with binary files


def offences(root: Path, names: list[str]) -> dict[str, str]:
    """Returns what is wrong with each file: too large, or binary (a zero byte) elsewhere."""
    found = {}
    for name in names:
        content = (root / name).read_bytes()
        if len(content) > MOST_BYTES:
            found[name] = f"{len(content)} bytes; expected at most {MOST_BYTES}"
        elif b"\0" in content and PICTURES not in Path(name).parents:
            found[name] = f"binary; expected text, or a picture in {PICTURES}"
    return found


def test_tracked_files_are_small_and_text():
    if not (ROOT / ".git").exists():
        pytest.skip("no clone of the repository: what git tracks is not known")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    names = [name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    assert len(names) > 500, "files are found"
    assert not offences(ROOT, names)


def test_offences_are_found(tmp_path):
    (tmp_path / PICTURES).mkdir(parents=True)
    contents = {
        "a.py": b"1\n", "a.whl": b"PK\0", "a.txt": b"a" * (MOST_BYTES + 1),
        f"{PICTURES}/a.png": b"\0", f"{PICTURES}/b.png": b"\0" * (MOST_BYTES + 1),
    }  # fmt: skip
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    assert [*offences(tmp_path, [*contents])] == ["a.whl", "a.txt", f"{PICTURES}/b.png"]


@pytest.mark.parametrize("name", ["slow.txt", "by_hand.txt"])
def test_listed_tests_exist(name):
    """A test that was renamed would be quick again, or be run by CI, unseen."""
    lines = (ROOT / "tests" / name).read_text().splitlines()
    for line in lines:
        if not line.startswith("#"):
            file, name = line.split("[")[0].rsplit("::", 1)
            assert f"def {name}(" in (ROOT / file).read_text(), line
