"""Errors a user can meet: `DcpcError` and one subclass for each phase.

Every message has three parts: what (node, op, bucket, rank), got / expected with units, what to do.
A broken invariant of dcpc's own is an `assert` with a message, never one of these.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ParamSpec, TypeVar

_HERE = Path(__file__).parent
_LIBRARIES = ("/torch/", "/sympy/")
_CALLERS = ("/torch/", "/contextlib.py", "/unittest/")  # between a line of forward and dcpc
# What Python calls code that is in no file: of a prompt, `python -c`, `exec` or a notebook's cell.
_NAMELESS = ("<stdin>", "<string>", "<console>", "<ipython-input-", "<python-input-")
# So is what a library makes by `exec`: methods of dataclasses and named tuples, torch's wrappers.
_MADE = {"__create_fn__", "__init__", "__new__", "__repr__", "__eq__", "__hash__", "__lt__"}
_MADE |= {"<lambda>"}
P = ParamSpec("P")
T = TypeVar("T")


class DcpcError(Exception):
    """Base of every error that dcpc raises for a user's mistake or an unmet request."""


class BucketError(DcpcError):
    """An input spec, a bucket size or a bucket file is wrong."""


class TraceError(DcpcError):
    """The module cannot be captured as one graph with symbolic dims."""


class RuleError(DcpcError):
    """A sharding rule is malformed or contradicts the op it is for."""


class ProfileError(DcpcError):
    """A cost cannot be derived from the graph."""


class PlanError(DcpcError):
    """No plan meets the request (memory, degree, micro-batch)."""


class CodegenError(DcpcError):
    """A plan cannot be turned into a runnable variant."""


class VerifyError(DcpcError):
    """What dcpc would run does not compute what the model computes."""


class DispatchError(DcpcError):
    """A call's arguments match no bucket or no input spec."""


class GroupError(DcpcError):
    """Ranks of a process group disagree, or one of them did not arrive in time."""


class CheckpointError(DcpcError):
    """A checkpoint cannot be written or read, or is of something else."""


class DataError(DcpcError):
    """A dataset or a sample cannot be dealt out as asked."""


class DefectError(DcpcError):
    """Something failed that dcpc neither refuses nor explains: a defect of dcpc."""


def refuse_unknown(
    what: str, given: Iterable[str], known: Sequence[str], error: type[DcpcError]
) -> None:
    """Refuses names of arguments that a function does not have, with the name that is near.

    Args:
        what: function, for the message.
        given: names of the arguments that it was called with.
        known: names that it has.
        error: class to raise.

    Raises:
        DcpcError: a name is unknown (class `error`).
    """
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}=?" if near else "leave it out"
            raise error(f"{what}: got {name}=; expected some of {', '.join(known)}; {hint}")


def refusing_unknown(
    what: str, error: type[DcpcError]
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Has a function refuse names of arguments that it does not have, see `refuse_unknown`."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        known = [name for name in inspect.signature(function).parameters if name != "self"]

        @functools.wraps(function)
        def run(*args: P.args, **given: P.kwargs) -> T:
            refuse_unknown(what, given, known, error)
            return function(*args, **given)

        return run

    return decorate


def users_line(error: BaseException) -> str:
    """Returns ` at FILE:LINE: code` of the innermost line of the user's in a traceback, or ""."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(f)]
    return _said_line(frames[-1]) if frames else ""


def running_line() -> str:
    """Returns ` at FILE:LINE: code` of the innermost line of the user's that is running, or ""."""
    every = [f for f in traceback.extract_stack() if not is_ours(f.filename)]
    frames = [f for f in every if not any(s in f.filename for s in _CALLERS)]
    return _said_line(frames[-1]) if frames else ""


def _said_line(frame: traceback.FrameSummary) -> str:
    """Returns ` at FILE:LINE: code`; without the code, where Python has not kept it."""
    code = f": `{frame.line}`" if frame.line else ""
    return f" at {frame.filename}:{frame.lineno}{code}"


def lies_in_no_file(filename: str) -> bool:
    """Returns whether a file's name is Python's for code of a prompt, a cell or `exec`."""
    return filename.startswith(_NAMELESS)


def is_ours(filename: str) -> bool:
    """Returns whether a file is one of dcpc's."""
    return _HERE in Path(filename).parents


@contextmanager
def explaining(doing: str) -> Iterator[None]:
    """Turns an error of torch's or Python's that comes out of dcpc into a `DefectError`.

    Errors that code of the user's raises, called by dcpc (a dataset, a logger, `weight=`), pass as
    they are, and so does running out of memory.

    Args:
        doing: name of the call and where training is, for the message.

    Raises:
        DefectError: with the first line of the error, and the line of the user's that it is about.
    """
    try:
        yield
    except GeneratorExit:  # of a loop that was left, maybe as Python ends and our names are gone
        raise
    except (DcpcError, MemoryError, Warning):
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [i for i, f in enumerate(frames) if is_ours(f.filename)]
        below = frames[ours[-1] + 1 :] if ours else frames
        called_back = any(_is_users(f) for f in below)
        if called_back or type(error).__name__ == "OutOfMemoryError":
            raise
        first = next((x.strip() for x in str(error).splitlines() if x.strip()), "no message")
        at = f" ({Path(frames[ours[-1]].filename).name}:{frames[ours[-1]].lineno})" if ours else ""
        raise DefectError(
            f"{doing}: got {type(error).__name__}: {first}{users_line(error)}{at}; expected no "
            "error of torch's or Python's; if the plain model runs with the same inputs, report "
            "this with the model and the whole traceback: it is a defect of dcpc"
        ) from error


def _is_users(frame: traceback.FrameSummary) -> bool:
    """Whether code is neither dcpc's, nor generated, nor of a library that dcpc stands on."""
    parts = frame.filename.replace("\\", "/")
    if parts.startswith("<"):
        made = parts == "<string>" and frame.name in _MADE
        return lies_in_no_file(parts) and not made
    if "/lib/python" in parts or is_ours(frame.filename):
        return False
    return not any(library in parts for library in _LIBRARIES)
