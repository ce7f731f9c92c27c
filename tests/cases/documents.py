"""Runs the blocks of a document as a reader would, from top to bottom.

    python -m tests.cases.documents docs/quickstart.md ...    # writes what they print today into it

* A python block runs in one namespace with those before it. With `title="name.py"` it is a file of
  that name instead, beside which the later blocks run.
* A bash block is run by a shell.
* A text block right after one of them is what that printed. A line `...` in it stands for any
  lines, `...` in a line for any text; numbers with a point may differ by 2%, and any white space
  is as good as any other, so long lines may be wrapped.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dcpc

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r'^```(python|bash|text)(?: title="([^"]+)")?\n(.*?)^```$', re.M | re.S)
NUMBER = re.compile(r"\d+\.\d+")
TOLERANCE = 0.02
SECONDS = 300


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block.

    Attributes:
        language: python, bash or text.
        title: the file that it is, or empty.
        code: what is in it.
        begin: where its content begins in the document.
        shown: of a python or bash block: the text block that follows it at once.
    """

    language: str
    title: str
    code: str
    begin: int
    shown: Block | None = None


def blocks(text: str) -> list[Block]:
    """Returns the blocks that run, with the output that the document shows of each."""
    found: list[Block] = []
    end = 0
    for match in FENCE.finditer(text):
        block = Block(match[1], match[2] or "", match[3], match.start(3))
        if block.language != "text":
            found.append(block)
        elif found and not text[end : match.start()].strip():
            last = found[-1]
            found[-1] = Block(last.language, last.title, last.code, last.begin, block)
        end = match.end()
    return found


def outputs(text: str, folder: Path) -> Iterator[tuple[Block, str]]:
    """Runs a document in a folder and yields each block with what it printed."""
    names: dict[str, Any] = {"__name__": "document"}
    with beside(folder):
        yield from _outputs(text, folder, names)


@contextlib.contextmanager
def beside(folder: Path) -> Iterator[None]:
    """Lets Python import the files of a folder, and forgets those modules at the end."""
    before = {*sys.modules}
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in {*sys.modules} - before:
            if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == folder:
                del sys.modules[name]


def _outputs(text: str, folder: Path, names: dict[str, Any]) -> Iterator[tuple[Block, str]]:
    for block in blocks(text):
        if block.title:
            (folder / block.title).write_text(block.code)
        elif block.language == "bash":
            yield block, shell(block.code, folder)
        else:
            yield block, executed(block.code, names, folder)


def executed(code: str, names: dict[str, Any], folder: Path) -> str:
    """Runs Python in a namespace; returns what it printed, and its DcpcError as Python shows it."""
    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        try:
            exec(compile(code, "<document>", "exec"), names)
        except dcpc.DcpcError as e:
            print(f"{type(e).__module__}.{type(e).__name__}: {e}")
    return printed.getvalue()


def shell(command: str, folder: Path) -> str:
    """Runs a command as in the activated environment; returns its output, errors left out."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    python = os.pathsep.join((str(folder), str(ROOT)))
    env = {**os.environ, "PATH": path, "PYTHONPATH": python, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True,
        timeout=SECONDS, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, f"{command}\n{ran.stdout[-2000:]}{ran.stderr[-4000:]}"
    return ran.stdout


def agrees(shown: str, printed: str) -> bool:
    """Whether an output is what a document shows."""
    pattern = re.escape(shown.strip())
    pattern = re.sub(r"(?m)^\\\.\\\.\\\.$", "[^\x00]*?", pattern).replace(r"\.\.\.", ".*?")
    pattern = re.sub(r"(?:\\?\s)+", r"\\s+", pattern)
    numbers = NUMBER.findall(shown)
    pattern = re.sub(r"\d+\\\.\d+", r"(\\d+\\.\\d+)", pattern)
    match = re.fullmatch(pattern, printed.strip())
    return match is not None and all(
        abs(float(said) - float(got)) <= TOLERANCE * abs(float(said))
        for said, got in zip(numbers, match.groups(), strict=True)
    )


def rewritten(text: str, folder: Path) -> str:
    """Returns the document with what its blocks print, where it shows anything else."""
    found = [(b.shown, out) for b, out in outputs(text, folder) if b.shown is not None]
    for shown, out in reversed(found):
        if not agrees(shown.code, out):
            end = shown.begin + len(shown.code)
            text = text[: shown.begin] + out.strip() + "\n" + text[end:]
    return text


def main() -> None:
    """Rewrites the documents that are named."""
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            Path(name).write_text(rewritten(Path(name).read_text(), Path(folder)))


if __name__ == "__main__":
    main()
