"""Errors a user can meet: `DcpcError` and one subclass for each phase.

Every message has three parts: what (node, op, bucket, rank), got / expected with units, what to do.
A broken invariant of dcpc's own is an `assert` with a message, never one of these.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import re
import reprlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ContextDecorator, contextmanager
from pathlib import Path
from types import TracebackType
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


class StoreError(DcpcError):
    """What lies beyond the device cannot be kept in the host's memory or on the disk."""


class CheckpointError(DcpcError):
    """A checkpoint cannot be written or read, or is of something else."""


class DataError(DcpcError):
    """A dataset or a sample cannot be dealt out as asked."""


class NoLengthError(DataError, TypeError):
    """Something has no `len()`; a `TypeError` as well, so that `list` and progress bars go on."""


class DefectError(DcpcError):
    """Something failed that dcpc neither refuses nor explains: a defect of dcpc."""


def class_named(name: str) -> type[DcpcError] | None:
    """Returns the class of an error that another rank told by its name; None: it is not dcpc's."""
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, DcpcError) else None


class _Bare(ContextDecorator):
    """Leaves only the user's own lines in the traceback of a `DcpcError` and of its causes.

    With `DCPC_TRACEBACK=full` all of it is shown, and so is that of a defect.
    """

    def __enter__(self) -> None:
        """Changes nothing."""

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        """Shortens a `DcpcError`."""
        full = isinstance(error, DefectError) or os.environ.get("DCPC_TRACEBACK") == "full"
        if isinstance(error, DcpcError) and not full:
            _users_part(error, [])


bare = _Bare()


def chain(error: BaseException | None) -> list[BaseException]:
    """Returns an error and all that it was raised from or in, each once."""
    found, todo = list[BaseException](), [error]
    while todo:
        each = todo.pop()
        if each is not None and not any(each is other for other in found):
            found.append(each)
            todo += [each.__context__, each.__cause__]
    return found


def _users_part(error: BaseException | None, seen: list[BaseException]) -> BaseException | None:
    """Returns a chain of errors with the user's lines alone, without those that have none."""
    if error is None or any(error is each for each in seen):
        return None
    below = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    error.__context__ = error.__cause__ or error.__context__  # `chain` has what is left out, too
    error.__cause__ = _users_part(below, [*seen, error])
    at, links = error.__traceback__, list[TracebackType]()
    while at is not None:
        links, at = [*links, at], at.tb_next
    for link in reversed(links):
        code = link.tb_frame.f_code
        if _is_users(traceback.FrameSummary(code.co_filename, link.tb_lineno, code.co_name)):
            at = TracebackType(at, link.tb_frame, link.tb_lasti, link.tb_lineno)
    error.__traceback__ = at
    return error.__cause__ if at is None else error


def meant(got: object, known: Iterable[object], otherwise: str, like: str = "{}") -> str:
    """Returns `did you mean X?` of the nearest known name, as in `like`; or other advice."""
    near = difflib.get_close_matches(str(got), [str(name) for name in known], n=1)
    return f"did you mean {like.format(near[0])}?" if near else otherwise


def check_choice(
    begins: str,
    got: object,
    known: Iterable[object],
    error: type[DcpcError] = PlanError,
    also: str = "",
) -> None:
    """Refuses a value that an option does not have, in a text that starts with `begins`.

    Raises:
        DcpcError: the value is none of the known ones, or of those in `also` (class `error`).
    """
    known = [*known]
    if not any(got is each or (isinstance(got, str) and got == each) for each in known):
        raise error(
            f"{begins}{reprlib.repr(got)}; expected one of {', '.join(map(str, known))}{also}; "
            f"{meant(got, known if isinstance(got, str) else (), 'choose one')}"
        )


def check_call(
    what: str,
    signature: inspect.Signature,
    args: Sequence[object],
    given: Mapping[str, object],
    error: type[DcpcError],
) -> None:
    """Refuses arguments that a function does not take, and names those that are probably meant.

    Raises:
        DcpcError: an argument is unknown, missing, given twice, or given by position though it has
            a name alone (class `error`).
    """
    known = signature.parameters
    options = [p for p in known.values() if p.kind is p.KEYWORD_ONLY]
    places = [name for name, p in known.items() if p not in options]
    taken = {*places[: len(args)], *given}
    takes = f"{', '.join(places)} by position"
    if options:
        takes += f", and by name some of {', '.join(p.name for p in options)}"
    for name in given:
        if name not in known:
            hint = meant(name, known, "leave it out", "{}=")
            raise error(f"{what}: got {name}=; expected some of {', '.join(known)}; {hint}")
        if name in places[: len(args)]:
            raise error(f"{what}: got {name} twice; expected it once; pass it by name alone")
    if len(args) > len(places):
        extra = args[len(places)]
        near = [f"{p.name}=" for p in options if p.name not in taken and _has_type_of(p, extra)]
        hint = f"did you mean {' or '.join(near)}?" if near else "pass it by its name"
        if len(near) > 3 or not options:
            hint = f"pass it by its name, such as {near[0]}" if near else "leave it out"
        shown = " ".join(reprlib.repr(extra).split())
        raise error(
            f"{what}: got {len(args)} arguments by position, {shown} among them; expected {takes}; "
            f"{hint}"
        )
    missing = [p.name for p in known.values() if p.default is p.empty and p.name not in taken]
    if missing:
        raise error(f"{what}: got no {missing[0]}; expected {takes}; pass it")


def _has_type_of(parameter: inspect.Parameter, value: object) -> bool:
    """Whether the annotation of a parameter names the type of a value."""
    kinds = {kind.__name__ for kind in type(value).__mro__[: 1 if type(value) is bool else -1]}
    kinds |= {"float"} if "int" in kinds else set()
    named = re.sub(r"\[.*?\]", "", str(parameter.annotation))  # of `Sequence[int]` no `int`
    return not kinds.isdisjoint(re.findall(r"\w+", named))


def checking_call(what: str, error: type[DcpcError]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Has a function refuse arguments that it does not take, see `check_call`."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        own = inspect.signature(function)
        bound = next(iter(own.parameters)) in ("self", "cls")
        signature = own.replace(parameters=[*own.parameters.values()][bound:])

        @functools.wraps(function)
        @bare
        def run(*args: P.args, **given: P.kwargs) -> T:
            check_call(what, signature, args[bound:], given, error)
            return function(*args, **given)

        return run

    return decorate


def users_line(error: BaseException) -> str:
    """Returns ` at FILE:LINE: code` of the innermost line of the user's in a traceback, or ""."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(f)]
    return _said_line(frames[-1]) if frames else ""


def defined_at(function: Callable[..., object]) -> str:
    """Returns ` (FILE:LINE)` of a function's definition, or "" where Python does not know it."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if code else ""


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

    Raises:
        DefectError: with the first line of the error, and the line of the user's that it is about.
    """
    try:
        with bare:
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
