"""Counts lines of code: docstrings, comments and blank lines are none."""

import ast
import inspect
import io
import tokenize
from collections import Counter
from types import ModuleType

from examples import train_text, train_text_ddp

_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip


def code_lines(module: ModuleType) -> Counter[str]:
    """Returns the lines of code of each function and class of a module; "" has all others."""
    source = inspect.getsource(module)
    tree = ast.parse(source)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {n for t in tokens if t.type not in _NO_CODE for n in range(t.start[0], t.end[0] + 1)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef) and ast.get_docstring(node):
            text = node.body[0]
            lines -= {*range(text.lineno, (text.end_lineno or 0) + 1)}
    found = Counter[str]()
    for node in tree.body:
        own = lines & {*range(node.lineno, (node.end_lineno or 0) + 1)}
        found[getattr(node, "name", "")] += len(own)
    return found


def of_both_loops() -> tuple[Counter[str], Counter[str]]:
    """Returns the lines of the loop by hand and of dcpc's; model and data are in neither."""
    ours = code_lines(train_text)
    del ours["model"], ours["Paragraphs"]
    return code_lines(train_text_ddp), ours
