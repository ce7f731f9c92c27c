"""Files, modules and functions of this repository that its documents name are there."""

import ast
import re
import subprocess
import sys
from functools import cache, reduce
from pathlib import Path

import dcpc  # noqa: F401 - whose names are looked up

ROOT = Path(__file__).parents[2]
OUTSIDE = ("build/", "shared/")  # made by a run, or beside a clone
AT_A_TAG = re.compile(r"\bat the tag `", re.I)  # of paragraphs on what the history alone has
FENCE = re.compile(r"^```.*?^```", re.M | re.S)
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
PATH = re.compile(r"(?:[\w.-]+/)*[\w.-]*\.(?:py|yaml|md|toml|sh)|(?:[\w.-]+/)+[\w.-]*")
OURS = r"(?<![\w./:-])((?:benchmarks|dcpc|examples|models|tests)(?:\.[a-z_]\w*)*"
FUNCTION = re.compile(OURS + r"):([a-z]\w+)\b")
MODULE = re.compile(r"-m " + OURS + r")\b(?![.(])")
NAME = re.compile(r"(?<![\w./-])dcpc((?:\.[A-Za-z]\w*)+)")


@cache
def tracked() -> tuple[str, ...]:
    """Returns the paths of the files under version control."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    return tuple(subprocess.check_output(command, cwd=ROOT, text=True).splitlines())


@cache
def endings() -> frozenset[str]:
    """Returns each file's and folder's path, from any of its folders on, without a slash."""
    every = {*tracked(), *(str(p) for f in tracked() for p in Path(f).parents)}
    parts = [each.split("/") for each in every]
    return frozenset("/".join(p[i:]) for p in parts for i in range(len(p)))


@cache
def folders() -> frozenset[str]:
    return frozenset(part for f in tracked() for part in f.split("/")[:-1])


def is_path(name: str) -> bool:
    """Whether a name is there, or does not look like one of a file or folder of ours."""
    known = name.removeprefix("../").split("/")[0] in folders() or "/" not in name
    return not known or name.startswith(OUTSIDE) or name.strip("/") in endings()


@cache
def defined(module: str) -> frozenset[str] | None:
    """Returns the names at the top of a module; None: there is no such module."""
    path = module.replace(".", "/")
    file = next((f for end in (".py", "/__main__.py", "/__init__.py")
                 if (f := ROOT / f"{path}{end}").is_file()), None)  # fmt: skip
    if file is None:
        return None
    found = set[str]()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {a.asname or a.name for a in node.names}
    return frozenset(found)


def resolves(name: str) -> bool:
    """Whether `dcpc` and a dotted name is a module, or an attribute of one."""
    parts = ["dcpc", *name.strip(".").split(".")]
    for n in range(len(parts), 0, -1):
        module, rest = ".".join(parts[:n]), parts[n:]
        names = defined(module)
        if names is None:
            continue
        if module not in sys.modules:  # such as dcpc.hf, which takes seconds
            return not rest or rest[0] in names
        try:
            reduce(getattr, rest, sys.modules[module])
        except AttributeError:
            continue
        return True
    return False


def missing(text: str) -> list[str]:
    """Returns the names in a document that are not there."""
    text = "\n\n".join(p for p in text.split("\n\n") if not AT_A_TAG.search(p))
    spans = SPAN.findall(FENCE.sub("", text))
    return [
        *(s for s in spans if PATH.fullmatch(s) and not is_path(s)),
        *(m for m in MODULE.findall(text) if defined(m) is None),
        *(f"{m}:{f}" for m, f in FUNCTION.findall(text) if f not in (defined(m) or ())),
        *(f"dcpc{name}" for s in spans for name in NAME.findall(s) if not resolves(name)),
    ]


def test_names_in_documents_are_there():
    documents = [f for f in tracked() if f.endswith(".md")]
    assert len(documents) > 120
    wrong = {f: found for f in documents if (found := missing((ROOT / f).read_text()))}
    assert not wrong, wrong


WRONG = """
`dcpc/plan/gone.py` `planner/gone.py` `gone.yaml` `dcpc/gone/` `dcpc.api.gone` `dcpc.Buckets.gone()`
`models.gpt:gone` and

    python -m benchmarks.gone
"""
RIGHT = """
`dcpc/plan/README.md` `planner/plans.py` `plans.py` `dcpc/plan/` `dcpc.api.plan` `k/n` `build/site`
`dcpc.Buckets.from_yaml(file)` `models.gpt:llama_8b` `my_project.models:gpt` `python -m tests.house`
at the tag `1`: `benchmarks/gone.py`
"""


def test_what_is_gone_is_found():
    assert len(missing(WRONG)) == 8
    assert missing(RIGHT) == []


def test_refusals_are_at_most_15_lines_each_with_the_way_out():
    text = (ROOT / "docs" / "limits.md").read_text()
    section = text.partition("## Refused, with the way out\n")[2].partition("\n## ")[0]
    listed = [line for line in section.splitlines() if line.startswith("* ")]
    assert 0 < len(listed) <= 15
    assert [line for line in listed if ": " not in line] == []
    assert not re.search(r"^  ", section, re.M), "an entry of two lines"
