"""Saves and loads everything that training goes on from; collective over all ranks.

save    state copied to the CPU ─► thread: files, checksums ─► manifest ─► renamed ─► old removed
load    rank 0 names the newest ─► every rank checks a share of its files ─► all read
              ├ the next older one, if it is damaged
              └ none: an error, or training starts
"""

from __future__ import annotations

import importlib
import logging
import warnings
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dcpc.errors import CheckpointError, DcpcError, check_choice
from dcpc.runtime.checkpoint.fitting import fitting, nested
from dcpc.runtime.checkpoint.folders import (
    FORMAT,
    begin,
    fault_of,
    final_folder,
    fingerprint,
    found_in,
    in_place_of_one,
    prune,
    publish,
    read_manifest,
    unfinished_folder,
    write_bytes,
    write_manifest,
)
from dcpc.runtime.checkpoint.optimizers import by_number
from dcpc.runtime.checkpoint.parts import Checkpoint, Parts
from dcpc.runtime.checkpoint.saving import Saving, reason_of
from dcpc.runtime.groups.agreement import PART, agree
from dcpc.runtime.groups.groups import Groups

LOG = logging.getLogger("dcpc")
_STATE = "state.pt"
# Values of `missing=`: the action for a folder without a checkpoint.
MISSING = ("error", "start")


class CheckpointWriter:
    """Checkpoints of one compiled model."""

    def __init__(self, groups: Groups) -> None:
        """Takes the ranks that save and load together."""
        self._groups = groups
        self._last: Saving | None = None
        self._damaged: set[Path] = set()  # that were found to be, on rank 0

    # --------------------------------------------------------------------------------------- save

    def save(
        self, directory: Path, step: int, parts: Parts, extra: Any, *, keep: int, wait: bool
    ) -> Saving:
        """Starts to write a checkpoint, and returns its handle; see `CompiledModel.save`."""
        problem: DcpcError | None = None
        state: dict[str, Any] = {}
        small: dict[str, Any] = {}
        try:
            self.wait()
            _check_count("step", step, 0)
            _check_count("keep", keep, 1)
            if not isinstance(wait, bool):
                raise CheckpointError(f"save: wait: got {wait!r}; expected True or False; pass one")
            state = parts.tensors()
            self._tensors.refuse_odd(state)
            small = self._small(parts, step, extra)
            if self._groups.rank == 0:
                begin(directory, step)
        except DcpcError as e:
            problem = e
        except OSError as e:
            problem = CheckpointError(
                f"save({str(directory)!r}): got {e}; expected a folder to write to; name another"
            )
        self._agree(f"save step {step} into {directory}, keep {keep}", problem)
        if parts.partial and "optimizer" in state:
            self._name_all(state["optimizer"]["param_groups"])
        state = self._tensors.staged(state, self._wire)
        small["seeds"] = self._from_all(parts.seeds.state_dict())
        packed = self._tensors.plain(small)

        def write() -> None:
            with self._groups.watch.naming():
                self._write(directory, step, parts, state, packed, keep)

        self._last = saving = Saving(final_folder(directory, step), write)
        if wait:
            self.wait()
        return saving

    def _name_all(self, groups: list[dict[str, Any]]) -> None:
        """Names in each group of an optimizer the parameters of all ranks, not of this one alone.

        Raises:
            CheckpointError: ranks have other numbers of groups.
        """
        told = self._from_all([group["params"] for group in groups])
        if len({len(each) for each in told}) > 1:
            raise CheckpointError(
                f"save: got optimizers of {', '.join(str(len(each)) for each in told)} groups of "
                "parameters on the ranks; expected as many on each; leave groups in that are "
                "empty on some rank"
            )
        for group, names in zip(groups, zip(*told, strict=True), strict=True):
            group["params"] = [*dict.fromkeys(name for mine in names for name in mine)]

    def wait(self) -> None:
        """Waits until the last checkpoint is written.

        Raises:
            CheckpointError: the checkpoint could not be written.
        """
        last, self._last = self._last, None
        if last is not None:
            last.wait()

    def _small(self, parts: Parts, step: int, extra: Any) -> dict[str, Any]:
        """Returns the state beside the tensors: loader, scheduler, step and `extra`."""
        found = {name: part.state_dict() for name, part in parts.small().items()}
        found |= {"step": step, "extra": extra}
        for name, value in found.items():
            try:
                self._tensors.plain(value)
            except CheckpointError as e:
                raise CheckpointError(f"save: {name}: {e}") from e
        return found

    def _write(
        self,
        directory: Path,
        step: int,
        parts: Parts,
        state: dict[str, Any],
        small: bytes,
        keep: int,
    ) -> None:
        folder = unfinished_folder(directory, step)
        optimizer = parts.optimizer

        def finish(files: dict[str, Any], table: dict[str, Any]) -> None:
            write_bytes(folder / _STATE, small)
            files[_STATE] = fingerprint(folder / _STATE)
            content = {
                "format": FORMAT,
                "step": step,
                "world": self._groups.world,
                "parameters": parts.mode,
                "optimizer": None if optimizer is None else type(optimizer).__name__,
                "files": files,
                "tensors": table,
            }
            write_manifest(folder, content)
            publish(directory, step)
            self._damaged.discard(final_folder(directory, step))
            prune(directory, step, keep, self._damaged)

        tensors = self._tensors
        tensors.write(state, tensors.ChecksummedWriter(folder, finish), self._wire)

    # --------------------------------------------------------------------------------------- load

    def load(self, directory: Path, parts: Parts, missing: str) -> Checkpoint:
        """Loads the newest whole checkpoint; see `CompiledModel.load`."""
        problem: DcpcError | None = None
        listed: list[Path] = []
        try:
            self.wait()
            check_choice("load: got missing=", missing, MISSING, CheckpointError)
            parts.parameters()  # those of the meta device are refused
            listed = found_in(directory)
        except DcpcError as e:
            problem = e
        except OSError as e:
            problem = _unreadable(directory, e)
        self._agree(f"load from {directory}, missing {missing}", problem)
        folder, manifest = self._newest(directory, listed)
        if folder is None:
            return self._started(directory, listed, missing)
        small: dict[str, Any] = {}
        into: dict[str, Any] = {}
        try:
            small = torch.load(folder / _STATE, weights_only=True)
            into = fitting(self._tensors, folder, parts, manifest, small)
            for name, part in parts.small().items():
                part.load_state_dict(small[name])
        except DcpcError as e:
            problem = e
        except Exception as e:  # of a user's loader or scheduler: the others wait
            problem = _unreadable(folder, e)
        self._agree(f"load {folder}", problem)
        try:
            self._tensors.read(folder, manifest["tensors"], into)
        except Exception as e:
            problem = _unreadable(folder, e)
        self._agree(f"read {folder}", problem)
        found = nested(self._tensors, manifest["tensors"], into)
        parts.model.load_state_dict(found.get("model", {}))
        parts.seeds.load_state_dict(small["seeds"])  # of every rank
        if parts.optimizer is not None:
            named = found["optimizer"]
            parts.optimizer.load_state_dict(by_number(parts.optimizer, parts.parameters(), named))
        if self._groups.rank == 0:
            LOG.info("load: training goes on from %s, step %d", folder, manifest["step"])
        return Checkpoint(manifest["step"], small["extra"], folder)

    def _newest(self, directory: Path, listed: list[Path]) -> tuple[Path | None, dict[str, Any]]:
        """Returns the folder and the manifest of the newest whole checkpoint.

        Raises:
            CheckpointError: checkpoints exist, and all are damaged.
        """
        faults: list[str] = []
        for name in self._told([str(folder) for folder in listed]):
            folder = Path(name)
            manifest, fault = self._told(_manifest(folder) if self._groups.rank == 0 else None)
            names = sorted(manifest.get("files", ()))[self._groups.rank :: self._groups.world]
            own = fault or fault_of(folder, manifest["files"], names)
            if own and not folder.is_dir():
                own = f"rank {self._groups.rank} does not see it, and all ranks need one folder"
            fault = next(filter(None, self._from_all(own)), "")
            if not fault:
                self._warn_of(faults)
                return folder, manifest
            faults.append(f"{folder}: {fault}")
            self._damaged.add(folder)
        if faults:
            raise CheckpointError(
                f"load({str(directory)!r}): got {len(faults)} checkpoints, all damaged "
                f"({'; '.join(faults)}); expected one that is whole; take them from a backup, or "
                "remove them to start from the beginning"
            )
        return None, {}

    def _started(self, directory: Path, listed: list[Path], missing: str) -> Checkpoint:
        """Returns an empty checkpoint, to start at step 0, where rank 0 sees no checkpoint.

        Raises:
            CheckpointError: raised on every rank: `missing` is "error", or another rank sees a
                checkpoint.
        """
        named = f"load({str(directory)!r})"
        seen = self._from_all(listed[0].name if listed else "")
        other = next(((rank, name) for rank, name in enumerate(seen) if name), None)
        if other is not None:
            raise CheckpointError(
                f"{named}: got {other[1]} on rank {other[0]}, and no checkpoint on rank 0; "
                "expected one folder that all ranks see; put it on a shared file system"
            )
        found, usable = self._told(in_place_of_one(directory) if self._groups.rank == 0 else None)
        if missing == "error" or not usable:
            start = ", or pass missing='start' to begin at step 0 where there is none" * usable
            raise CheckpointError(
                f"{named}: got {found}; expected a folder in which save has written a checkpoint; "
                f"correct the name{start}"
            )
        if self._groups.rank == 0:
            LOG.info("%s: got %s: training starts at step 0", named, found)
        return Checkpoint()

    def _warn_of(self, faults: list[str]) -> None:
        if faults and self._groups.rank == 0:
            warnings.warn(
                f"checkpoints that are damaged are passed over: {'; '.join(faults)}", stacklevel=5
            )

    # ------------------------------------------------------------------------------ between ranks

    @cached_property
    def _tensors(self) -> Any:
        # Not at the top: whoever saves nothing does not wait for it.
        return importlib.import_module("dcpc.runtime.checkpoint.tensors")

    @cached_property
    def _wire(self) -> dist.ProcessGroup | None:
        """The group of all ranks in which only checkpoints send; made by all of them at once."""
        return self._groups.separate("checkpoints")

    def _agree(self, what: str, problem: DcpcError | None) -> None:
        """Raises this rank's problem, on the other ranks an error that names it."""
        groups = self._groups
        agree(groups, groups.world, "checkpoint", PART.join([what, str(problem or "")]))
        if problem is not None:
            raise problem

    def _told(self, value: Any) -> Any:
        """Returns rank 0's value."""
        if self._wire is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self._wire, group_src=0)
        return box[0]

    def _from_all(self, value: Any) -> list[Any]:
        """Returns every rank's value."""
        if self._wire is None:
            return [value]
        box: list[Any] = [None] * self._groups.world
        dist.all_gather_object(box, value, group=self._wire)
        return box


def _manifest(folder: Path) -> tuple[dict[str, Any], str]:
    """Returns the manifest of a checkpoint, and its fault or ""."""
    try:
        return read_manifest(folder), ""
    except CheckpointError as e:
        return {}, str(e)


def _unreadable(folder: Path, e: Exception) -> CheckpointError:
    problem = CheckpointError(
        f"load {folder}: got {reason_of(e)}; expected to read it; see whether every rank has the "
        "folder, and whether the loader and the scheduler are those that were saved"
    )
    problem.__cause__ = e
    return problem


def _check_count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 63:
        raise CheckpointError(
            f"save: {name}: got {value!r}; expected an integer from {least} on; pass one"
        )
