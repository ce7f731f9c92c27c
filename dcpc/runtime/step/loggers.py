"""Loggers for `compiled.log_to`: a progress bar or lines on the console, and TensorBoard."""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dcpc.buckets import path_of
from dcpc.errors import DataError
from dcpc.runtime.data.arguments import check_count
from dcpc.runtime.data.steps import Step
from dcpc.runtime.step.result import StepResult


class ConsoleLogger:
    """Shows train steps: a progress bar on a terminal, elsewhere a line every few steps.

    Example:
        compiled.log_to(dcpc.ConsoleLogger(steps=1000))

    Args:
        steps: steps that will come; None: unknown.
        every: steps from one line to the next where there is no terminal.
        console: console of rich to write to; default: stderr.

    Raises:
        DataError: a number is less than 1.
    """

    def __init__(
        self, steps: int | None = None, every: int = 10, console: Console | None = None
    ) -> None:
        for name, number in (("steps", steps), ("every", every)):
            if number is not None:
                check_count(f"ConsoleLogger, {name}", number, 1)
        self._console = Console(stderr=True) if console is None else console
        text = TextColumn("{task.description}", markup=False)
        columns = (BarColumn(), MofNCompleteColumn(), text, TimeRemainingColumn())
        self._bar = Progress(*columns, console=self._console)
        self._task = self._bar.add_task("", total=steps)
        self._every, self._steps, self._done, self._last_s = every, steps, 0, 0.0

    def __call__(self, step: Step, result: StepResult) -> None:
        """Shows one step, and the result of `train_step` for it."""
        now_s = time.perf_counter()
        took_s = now_s - self._last_s if self._done else result.seconds_s
        self._done, self._last_s = self._done + 1, now_s
        text = (
            f"loss {float(result.loss):.4f}, {step.tokens / took_s:,.0f} tokens/s, "
            f"ranks idle {result.imbalance:.0%}"
        )
        if self._console.is_terminal:
            if self._done == 1:
                self._bar.start()
                atexit.register(self.close)
            self._bar.update(self._task, advance=1, description=text)
        elif self._done % self._every in (0, 1 % self._every):
            self._console.print(f"step {self._done}: {text}", markup=False, highlight=False)
        if self._done == self._steps:
            self.close()

    def close(self) -> None:
        """Ends the bar."""
        self._bar.stop()
        atexit.unregister(self.close)


class TensorBoardLogger:
    """Writes each train step's measured and predicted numbers to TensorBoard.

    Example:
        compiled.log_to(dcpc.TensorBoardLogger("runs/first"))

    Args:
        log_dir: folder of the event files; made when the first step is written.

    Raises:
        DataError: the package tensorboard is not installed.
    """

    def __init__(self, log_dir: str | Path) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise DataError(
                f"TensorBoardLogger({str(log_dir)!r}): got no package tensorboard; expected it to "
                "be installed; pip install tensorboard, or read compiled.stats() and the log"
            )
        self._log_dir = str(path_of(log_dir, DataError, "TensorBoardLogger"))
        self._writer: Any = None
        self._steps = 0

    def __call__(self, step: Step, result: StepResult) -> None:
        """Writes one step, and the result of `train_step` for it."""
        if self._writer is None:
            # Not at the top: it takes seconds, and dcpc works without it.
            module = importlib.import_module("torch.utils.tensorboard")
            self._writer = module.SummaryWriter(self._log_dir)
        for name, value in result.figures(step).items():
            self._writer.add_scalar(name, value, self._steps)
        self._steps += 1
        self._writer.flush()

    def close(self) -> None:
        """Ends the event file."""
        if self._writer is not None:
            self._writer.close()
