"""Resolves names of a command line: models and functions as `module:attribute`, output files."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dcpc.errors import PlanError, meant
from dcpc.trace.loss import Loss, check_loss, check_names, returned


def load_model(text: str) -> nn.Module:
    """Returns the module that a factory makes.

    Args:
        text: `module:factory`; the module is looked for in the working directory too.

    Raises:
        PlanError: there is no such module or factory, it raises, or it does not make a module.
    """
    return _made(text, load_function(text))


class _WithLoss(nn.Module):
    """A model that returns the loss of another one's outputs, with that one's parameters."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, **inputs: Tensor) -> Any:
        return returned(self.model, inputs, self.loss)


def with_loss(model: nn.Module, loss: Loss | None, inputs: Collection[str]) -> nn.Module:
    """Returns a module that returns the loss: the model itself where `loss` is None.

    Raises:
        TraceError: neither takes one of the inputs, or `loss` takes another one.
    """
    check_names(model, inputs, loss)
    return model if loss is None else _WithLoss(model, loss)


def load_loss(text: str | None) -> Loss | None:
    """Returns the loss function that `module:attribute` names; None for None.

    Raises:
        PlanError: there is no such module or callable.
        TraceError: it cannot be a loss.
    """
    loss = None if text is None else load_function(text, "--loss", "the loss")
    check_loss(loss)
    return loss


def load_example(text: str | None) -> Callable[..., Any] | None:
    """Returns the function that makes an example's inputs, as `load_loss` returns a loss."""
    return None if text is None else load_function(text, "--example", "inputs")


def load_function(text: str, option: str = "model", made: str = "the model") -> Callable[..., Any]:
    """Returns the callable that `module:attribute` names.

    Args:
        text: as the command line has it.
        option: where it stands there, for errors.
        made: what the callable returns, for errors.

    Raises:
        PlanError: there is no such module or callable.
    """
    name, colon, attribute = text.partition(":")
    if not (name and colon and attribute.isidentifier()):
        raise PlanError(
            f"got {option} {text!r}; expected MODULE:NAME such as my_project.models:gpt; name "
            f"a function that returns {made}"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a console script does not have it, `python -m` has
    try:
        module = importlib.import_module(name)
    except Exception as error:
        said = error if isinstance(error, ImportError) else _said(error)
        raise PlanError(
            f"{option} {text}: got {said} from importing {name}; expected a module that "
            f"this Python finds; run dcpc in its folder ({os.getcwd()} is looked in), or install it"
        ) from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        got = "nothing of this name" if factory is None else f"a {type(factory).__name__}"
        hint = meant(attribute, _callables(module), "correct the name, or add it")
        raise PlanError(
            f"{option} {text}: got {got} in {name}; expected a callable that returns {made}; {hint}"
        )
    found: Callable[..., Any] = factory
    return found


def check_writable(option: str, file: Path | None) -> None:
    """Refuses a file that cannot be written, before the work that it is for.

    Raises:
        PlanError: it is a folder, or its folder cannot be made or written to.
    """
    if file is None:
        return
    got = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        got = f"a folder that cannot be made ({error.strerror}: {error.filename})"
    if got is None and file.is_dir():
        got = "a folder"
    if got is None and not os.access(file if file.exists() else file.parent, os.W_OK):
        got = "no leave to write it"
    if got is not None:
        raise PlanError(f"{option} {file}: got {got}; expected a file to write; name another")


@contextlib.contextmanager
def writing(file: Path) -> Iterator[None]:
    """Wraps the writing of a result: a disk that is full by now is an error that names the file.

    Args:
        file: path; its folder is made if it is missing. After an error the file is removed.

    Raises:
        PlanError: the file could not be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        with contextlib.suppress(OSError):
            if file.is_file():
                file.unlink()
        raise PlanError(
            f"{file}: got {error.strerror or error}; expected to write it; look at the disk's "
            "space and rights, or name another file"
        ) from error


def _made(text: str, factory: Any) -> nn.Module:
    try:
        model = factory()
    except TypeError as error:
        raise PlanError(
            f"model {text}: calling it raised TypeError: {error}; expected a callable that needs "
            "no arguments; write a function that fills them in and name that"
        ) from error
    except Exception as error:
        raise PlanError(
            f"model {text}: calling it raised {_said(error)}; expected a callable that returns the "
            "model; correct it, and try it alone in Python"
        ) from error
    if not isinstance(model, nn.Module):
        raise PlanError(
            f"model {text}: got a {type(model).__name__}; expected a torch.nn.Module; return the "
            "model from the factory"
        )
    return model


def _said(error: Exception) -> str:
    """Returns an error's type, first line, and the line of code that raised it."""
    lines = str(error).strip().splitlines() or ["no message"]
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {lines[0]} (at {at.filename}:{at.lineno})"


def _callables(module: object) -> list[str]:
    names = (n for n in vars(module) if not n.startswith("_"))
    return [n for n in names if callable(getattr(module, n))]
