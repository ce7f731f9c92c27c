"""The README of each folder of dcpc/: short, and with the files that there are."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
MOST_LINES = 60
MANY_MODULES = 3  # a sub-folder with more of them has a README
DATA = {".py", ".yaml"}
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("dcpc/**/README.md")]
)


def entries(folder: Path) -> set[str]:
    """Returns the names of what a folder holds, sub-folders with a slash."""
    return {
        f"{e.name}/" if e.is_dir() else e.name
        for e in folder.iterdir()
        if (e / "__init__.py").is_file() or (e.suffix in DATA and e.name != "__init__.py")
    }


def needs_readme(folder: Path) -> bool:
    modules = [name for name in entries(folder) if name.endswith(".py")]
    return folder.parent in {ROOT, ROOT / "dcpc"} or len(modules) > MANY_MODULES


def named(text: str) -> list[str]:
    """Returns the entries that a README lists, a line each."""
    return re.findall(r"^\* \[`([^`]+)`\]", text, re.M)


def faults(folder: Path) -> list[str]:
    readme = folder / "README.md"
    if not readme.is_file():
        return ["no README.md"]
    text = readme.read_text()
    names, there = named(text), entries(folder)
    return [
        *([f"more than {MOST_LINES} lines"] if len(text.splitlines()) > MOST_LINES else []),
        *(f"no line for {name}" for name in sorted(there - {*names})),
        *(f"{name} is not there" for name in names if name not in there),
        *(f"{name} has two lines" for name in {*names} if names.count(name) > 1),
        *(
            f"no '{part}'"
            for part in ("**In**", "**Out**", "Invariants", "```")
            if part not in text
        ),
    ]


FOLDERS = [
    f for f in sorted({f.parent for f in ROOT.glob("dcpc/**/__init__.py")}) if needs_readme(f)
]


def test_readmes_name_what_their_folders_hold():
    assert len(FOLDERS) > 50, "folders are found"
    assert not {str(f.relative_to(ROOT)): found for f in FOLDERS if (found := faults(f))}


def test_faults_are_found(tmp_path):
    (tmp_path / "new.py").touch()
    assert faults(tmp_path) == ["no README.md"]
    (tmp_path / "README.md").write_text("* [`old.py`](old.py): gone\n" + "\n" * MOST_LINES)
    found = faults(tmp_path)
    assert found[:3] == ["more than 60 lines", "no line for new.py", "old.py is not there"]


def dead_links(file: Path) -> list[str]:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", file.read_text())
    return [link for link in links if "://" not in link and not (file.parent / link).exists()]


def test_links_of_documents_lead_somewhere():
    assert len(DOCUMENTS) > 80, "documents are found"
    assert not {str(f.relative_to(ROOT)): dead for f in DOCUMENTS if (dead := dead_links(f))}


def test_dead_links_are_found(tmp_path):
    (tmp_path / "a.md").write_text("[a](a.md#here) [b](b.md) [c](https://example.org/c)")
    assert dead_links(tmp_path / "a.md") == ["b.md"]
