"""Pictures by matplotlib, which is installed for them alone: `dcpc[plots]`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcpc.commands.shared.factories import check_writable
from dcpc.errors import PlanError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def drawing(module: str) -> Any:
    """Returns a module of matplotlib.

    Raises:
        PlanError: matplotlib is not installed.
    """
    try:
        return importlib.import_module(f"matplotlib.{module}")
    except ImportError as error:
        raise PlanError(
            f"a picture: got {error}; expected matplotlib, which draws it; pip install "
            "matplotlib, or ask for no picture"
        ) from error


def blank(width: float, height: float) -> Figure:
    """Returns an empty figure of so many inches."""
    figure: Figure = drawing("figure").Figure(figsize=(width, height), layout="constrained")
    return figure


def check_drawable(option: str, file: Path | None) -> None:
    """Refuses a file with a picture that cannot be drawn or written, before the work for it.

    Raises:
        PlanError: it cannot be written, or matplotlib is not installed.
    """
    check_writable(option, file)
    if file is not None:
        drawing("figure")
