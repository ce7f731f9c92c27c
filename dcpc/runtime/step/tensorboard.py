"""Writes train steps to TensorBoard, where that is installed."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from dcpc.buckets import path_of
from dcpc.errors import DataError
from dcpc.runtime.data.steps import Step
from dcpc.runtime.step.result import StepResult


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
        """Writes one step.

        Args:
            step: step of the loader.
            result: result of `train_step` for it.
        """
        if self._writer is None:
            # Not at the top: it takes seconds, and dcpc works without it.
            module = importlib.import_module("torch.utils.tensorboard")
            self._writer = module.SummaryWriter(self._log_dir)
        values = {
            "loss": float(result.loss),
            "seconds/step": result.seconds_s,
            "seconds/predicted": step.plan.makespan_s,
            "imbalance/measured": result.imbalance,
            "imbalance/predicted": step.plan.imbalance,
            "reduction/early_share": result.early_bytes / max(result.reduced_bytes, 1),
            "tokens_per_s": step.tokens / result.seconds_s,
        }
        if result.grad_norm is not None:
            values["grad_norm"] = result.grad_norm
        ranks = zip(result.busy_s, result.idle_s, step.plan.busy_s, strict=True)
        for rank, (busy_s, idle_s, predicted_s) in enumerate(ranks):
            values[f"busy_s/rank_{rank}"] = busy_s
            values[f"idle_s/rank_{rank}"] = idle_s
            values[f"busy_predicted_s/rank_{rank}"] = predicted_s
        for name, value in values.items():
            self._writer.add_scalar(name, value, self._steps)
        self._steps += 1
        self._writer.flush()

    def close(self) -> None:
        """Ends the event file."""
        if self._writer is not None:
            self._writer.close()
