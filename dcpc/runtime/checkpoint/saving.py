"""Writes a checkpoint in a thread while training continues."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from dcpc.errors import CheckpointError

LOG = logging.getLogger("dcpc")


class Saving:
    """A checkpoint that is written in a thread.

    Attributes:
        folder: final path of the checkpoint.
    """

    def __init__(self, folder: Path, write: Callable[[], None]) -> None:
        """Starts the thread."""
        self.folder = folder
        self._write = write
        self._problem: CheckpointError | None = None
        # The process waits for it at its end: it is no daemon.
        self._thread = threading.Thread(target=self._run, name=f"dcpc save {folder.name}")
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Waits until the checkpoint is complete, and returns its folder.

        Raises:
            CheckpointError: the checkpoint could not be written; earlier ones are unchanged.
        """
        self._thread.join()
        if self._problem is not None:
            raise self._problem
        return self.folder

    def _run(self) -> None:
        try:
            self._write()
        # torch.distributed.checkpoint's own error, which has those of all ranks, is no Exception.
        except BaseException as e:
            self._problem = CheckpointError(
                f"checkpoint {self.folder}: got {reason_of(e)}; expected to write it; look at the "
                "disk's space and rights, or at the ranks that it names: the checkpoints before it "
                "are as they were"
            )
            self._problem.__cause__ = e
            LOG.error("%s", self._problem)


def reason_of(e: BaseException) -> str:
    """Returns an error in one line; for torch's collective error, the errors of its ranks."""
    failures = getattr(e, "failures", None)
    if isinstance(failures, dict) and failures:
        return "; ".join(f"rank {rank}: {reason_of(each)}" for rank, (each, _) in failures.items())
    lines = str(e).strip().splitlines()
    return f"{type(e).__name__}: {lines[0] if lines else 'no text'}"
