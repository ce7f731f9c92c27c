"""Answers checks of values that only raise, as a trace has no values.

    if labels.max() >= classes: raise ...   ->  False
    if not (ids >= 0).all(): raise ...      ->  True
    assert mask.any()                       ->  True

Whatever goes on past such a check has passed it. Any other branch on values is torch's to refuse.
"""

from __future__ import annotations

import ast
import linecache
import sys
from functools import cache
from itertools import islice
from types import FrameType

from dcpc.errors import is_ours

_At = tuple[int | None, int | None, int | None, int | None]  # first and last line, and columns
_parse = cache(ast.parse)


def passing() -> bool | None:
    """Returns the truth value by which the running line of forward's passes its check.

    None where that line is no such check, or code that called it may catch what it raises.
    """
    frame = _asking()
    tree, callers = _tree(frame.f_code.co_filename), [frame]
    # What makes the value comes before what tests it, but for comparisons in Python 3.13.
    now = frame.f_lasti // 2
    places = islice(frame.f_code.co_positions(), max(0, now - 1), now + 1)
    found = next((x for x in (_in_block(tree, at) for at in places) if x is not None), None)
    while (back := callers[-1].f_back) is not None and not is_ours(back.f_code.co_filename):
        callers.append(back)
    # torch's own code between them raises an error of forward's again.
    theirs = [(f.f_code.co_filename, f.f_lineno) for f in callers]
    outside = ((_tree(file), line) for file, line in theirs if "/torch/" not in file)
    return None if found is None or any(_catches(*at) for at in outside) else found


def _asking() -> FrameType:
    """Returns the frame of forward, or of torch, whose question is being answered."""
    frame = sys._getframe(1)
    inner = ("passing", "asked_by_torch", "__torch_function__", "_called", "_answer")
    while frame.f_code.co_name in inner and frame.f_back is not None:
        frame = frame.f_back
    return frame


def asked_by_torch() -> bool:
    """Whether code of torch's asks, such as `torch._check`, which a trace takes as it is."""
    return "/torch/" in _asking().f_code.co_filename


def _tree(file: str) -> ast.AST:
    """Returns the code of a file as it is now, empty where there is none."""
    linecache.checkcache(file)
    try:
        return _parse("".join(linecache.getlines(file)))  # type: ignore[no-any-return]
    except SyntaxError:
        return ast.Module([], [])


@cache
def _catches(tree: ast.AST, line: int) -> bool:
    """Whether a `try` around a line may go on after an error: a handler that does not raise."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Try | ast.TryStar) and node.body[0].lineno <= line:
            goes_on = any(not isinstance(h.body[-1], ast.Raise) for h in node.handlers)
            if goes_on and line <= (node.body[-1].end_lineno or line):
                return True
    return False


def _in_block(node: ast.AST, at: _At) -> bool | None:
    """Returns the answer of the check at a place within a node."""
    if isinstance(node, ast.Assert):
        return _answer(node.test, at, True)
    if isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], ast.Raise):
        found = _answer(node.test, at, False)
        if found is not None:
            return found
    inner = (_in_block(child, at) for child in ast.iter_child_nodes(node))
    return next((found for found in inner if found is not None), None)


def _answer(test: ast.expr, at: _At, wanted: bool) -> bool | None:
    """Returns the value of the part of a test at a place, by which the test is as wanted."""
    if (test.lineno, test.end_lineno, test.col_offset, test.end_col_offset) == at:
        return wanted
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _answer(test.operand, at, not wanted)
    parts = test.values if isinstance(test, ast.BoolOp) else []
    return next((x for x in (_answer(p, at, wanted) for p in parts) if x is not None), None)
