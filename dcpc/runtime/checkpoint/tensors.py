"""Tensors of a checkpoint, written and read by torch.distributed.checkpoint without a pickle.

Where each tensor lies is kept as JSON in the manifest: `.metadata`, which torch writes as well, is
a pickle, and its reader would run what it says. All else is read with `weights_only=True`.

Imported when the first checkpoint is made: `import dcpc` does not wait for it.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, zeros
from torch.futures import Future

from dcpc.errors import CheckpointError
from dcpc.runtime.checkpoint.folders import fingerprint

StatePath = tuple[str | int, ...]
Finish = Callable[[dict[str, Any], dict[str, Any]], None]
_DIGEST = "/digest of a file"  # no tensor is called so


def flat(nested: Any, path: StatePath = ()) -> dict[str, tuple[StatePath, Any]]:
    """Returns name -> path and value for each leaf of nested state, named as torch does."""
    if isinstance(nested, Mapping):
        parts = [((*path, str(k)), v) for k, v in nested.items()]
    elif isinstance(nested, list) and not _is_leaf(nested):
        parts = [((*path, n), v) for n, v in enumerate(nested)]
    else:
        return {".".join(map(str, path)): (path, nested)}
    return {name: leaf for at, value in parts for name, leaf in flat(value, at).items()}


def nested(leaves: list[tuple[StatePath, Any]]) -> dict[Any, Any]:
    """Returns nested state with these leaves; integer keys in a path are list indices."""
    found: dict[Any, Any] = {}
    for path, value in leaves:
        at = found
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = value
    return {key: _with_lists(value) for key, value in found.items()}


def _with_lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    inner = {key: _with_lists(v) for key, v in value.items()}
    in_list = bool(inner) and all(isinstance(key, int) for key in inner)
    return [inner[key] for key in sorted(inner)] if in_list else inner


def _is_leaf(value: Any) -> bool:
    """Whether torch stores a value in one piece."""
    if isinstance(value, Mapping | Tensor):
        return False
    return not isinstance(value, list) or all(
        not isinstance(v, Mapping | Tensor) and _is_leaf(v) for v in value
    )


def plain(value: Any) -> bytes:
    """Returns a value as bytes that torch can load with `weights_only=True`.

    Raises:
        CheckpointError: loading the value would run a pickle.
    """
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        stream.seek(0)
        torch.load(stream, weights_only=True)
    except Exception as e:  # whatever a user's object raises when it is pickled
        raise CheckpointError(
            f"got a value that is no plain one ({str(e).strip().splitlines()[0]}); expected "
            "numbers, texts, None, tensors, and lists, tuples and dicts of these, which are read "
            "without running a pickle; save what state_dict() of the object returns, or convert it"
        ) from e
    return stream.getvalue()


def refuse_odd(state: Mapping[str, Any]) -> None:
    """Refuses nested state with values that only a pickle could restore.

    Raises:
        CheckpointError: such a value exists.
    """
    plain([value for _, value in flat(state).values() if not isinstance(value, Tensor)])


def staged(state: Mapping[str, Any], group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Copies nested state to the CPU, so that training may change the originals."""
    mesh = None if group is None else DeviceMesh.from_group(group, "cpu")

    def copied(value: Any) -> Any:
        if isinstance(value, DTensor):
            assert mesh is not None, "ranks share a tensor"
            local = value.to_local().detach().to("cpu", copy=True)
            own = mesh
            if value.device_mesh.ndim > 1:  # each block has all of it: of equal parts one is kept
                own = DeviceMesh.from_group(value.device_mesh.get_group("shard"), "cpu")
            elif value.device_mesh.size() != mesh.size():  # the ranks of a stage share it out
                own = DeviceMesh.from_group(value.device_mesh.get_group(), "cpu")
            return DTensor.from_local(
                local, own, value.placements[-1:], run_check=False,
                shape=value.shape, stride=value.stride(),
            )  # fmt: skip
        return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value

    def walked(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: walked(v) for key, v in value.items()}
        return [walked(v) for v in value] if isinstance(value, list) else copied(value)

    found: dict[str, Any] = walked(state)
    return found


class ChecksummedWriter(FileSystemWriter):
    """Writes tensors with a checksum of each file; rank 0 completes the checkpoint."""

    def __init__(self, folder: Path, finish: Finish) -> None:
        """Writes nothing yet.

        Args:
            folder: empty existing folder.
            finish: function that rank 0 calls after all writes, with size and SHA-256 of each file
                and the location of each tensor.
        """
        super().__init__(folder)
        self._finish = finish

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's tensors."""
        results = super().write_data(plan, planner).value()
        names = {r.storage_data.relative_path for r in results}
        made = {name: fingerprint(Path(self.path) / name) for name in sorted(names)}
        results.append(WriteResult(MetadataIndex(_DIGEST), 0, made))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes `.metadata`, then calls the `finish` function with checksums and locations."""
        files: dict[str, Any] = {}
        kept: list[list[WriteResult]] = []
        for own in results:
            kept.append([r for r in own if r.index.fqn != _DIGEST])
            for r in own:
                files |= r.storage_data if r.index.fqn == _DIGEST else {}
        super().finish(metadata, kept)
        # Some releases write it into the metadata that they are given, others into a copy.
        metadata.storage_data = {r.index: r.storage_data for own in kept for r in own}
        files[".metadata"] = fingerprint(Path(self.path) / ".metadata")
        self._finish(files, table_of(metadata))


def write(
    state: dict[str, Any], writer: ChecksummedWriter, group: dist.ProcessGroup | None
) -> None:
    """Writes nested CPU state; collective over all ranks.

    Args:
        state: state dict of this rank.
        writer: writer of the checkpoint's folder.
        group: group of all ranks that nothing else uses meanwhile; None: one rank.
    """
    if group is not None:
        save(state, storage_writer=writer, process_group=group)
        return
    # What `save` does, which would warn that it is alone.
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, writer.storage_meta(), True)
    writer.set_up_storage_writer(True)
    own = writer.prepare_local_plan(planner.create_local_plan())
    (own,), metadata = planner.create_global_plan([own])
    (own,) = writer.prepare_global_plan([own])
    results = writer.write_data(planner.finish_plan(own), planner).value()
    writer.finish(metadata, [results])


def table_of(metadata: Metadata) -> dict[str, Any]:
    """Returns the location of each tensor as plain values; `metadata_of` is the reverse."""
    places = {(i.fqn, tuple(i.offset or ())): s for i, s in metadata.storage_data.items()}

    def place(fqn: str, offsets: tuple[int, ...]) -> list[str | int]:
        info = places[fqn, offsets]
        return [info.relative_path, info.offset, info.length]

    table: dict[str, Any] = {}
    for name, kept in metadata.state_dict_metadata.items():
        row: dict[str, Any] = {"path": list(metadata.planner_data[name])}
        if isinstance(kept, TensorStorageMetadata):
            row["dtype"] = str(kept.properties.dtype).removeprefix("torch.")
            row["size"] = list(kept.size)
            row["chunks"] = [
                [list(c.offsets), list(c.sizes), *place(name, tuple(c.offsets))]
                for c in kept.chunks
            ]
        else:
            row["place"] = place(name, ())
        table[name] = row
    return table


@dataclass(frozen=True, slots=True)
class _Slice:
    """Location of a value in a file, with the fields that torch's reader uses."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


def metadata_of(table: Mapping[str, Any]) -> Metadata:
    """Returns the metadata that torch's reader takes."""
    kept: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, _Slice] = {}
    for name, row in table.items():
        if "place" in row:
            kept[name] = BytesStorageMetadata()
            places[MetadataIndex(name)] = _Slice(*row["place"])
            continue
        chunks = []
        for offsets, sizes, *place in row["chunks"]:
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            places[MetadataIndex(name, offsets)] = _Slice(*place)
        dtype = dtype_of(row)
        assert dtype is not None, f"{name} is a tensor"
        properties = TensorProperties(dtype=dtype)
        kept[name] = TensorStorageMetadata(properties, torch.Size(row["size"]), chunks)
    return Metadata(kept, storage_data=places)


def dtype_of(row: Mapping[str, Any]) -> torch.dtype | None:
    """Returns the dtype of a table's row; None: the value is no tensor."""
    found = getattr(torch, row["dtype"]) if "dtype" in row else None
    assert found is None or isinstance(found, torch.dtype), "the checksum holds"
    return found


class _PlainPlanner(DefaultLoadPlanner):
    """Loads values that are no tensors without running a pickle."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def read(folder: Path, table: Mapping[str, Any], into: dict[str, Any]) -> None:
    """Reads this rank's part of each tensor; not collective.

    Args:
        folder: folder of a checkpoint.
        table: location of each tensor.
        into: name -> tensor to write to, or any placeholder where the value is no tensor; it is
            replaced by the value.
    """
    metadata = metadata_of(table)
    planner = _PlainPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(into, metadata, True)
    reader = FileSystemReader(folder)
    reader.set_up_storage_reader(metadata, True)
    plan: LoadPlan = reader.prepare_local_plan(planner.create_local_plan())
    with torch.no_grad():
        reader.read_data(planner.finish_plan(plan), planner).wait()
    into.update(planner.state_dict)


def empty_like(parameter: Tensor | None, row: Mapping[str, Any]) -> Any:
    """Returns a target that an optimizer's value can be read into.

    Returns:
        A tensor, sharded along dim 0 like the parameter if it is as long; None for a value that is
        no tensor.
    """
    dtype = dtype_of(row)
    if dtype is None:
        return None
    size = torch.Size(row["size"])
    # torch.optim counts steps by a tensor of this name, which is no DTensor, beside 0-dim ones.
    counts = not size and (row["path"][-1] == "step" or parameter is None or parameter.dim() > 0)
    if counts or parameter is None:
        return torch.zeros(size, dtype=dtype)
    if not isinstance(parameter, DTensor):
        return torch.zeros(size, dtype=dtype, device=parameter.device)
    if size == parameter.shape:
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    whole = not parameter.dim() or size[0] != parameter.shape[0]
    places = [*parameter.placements[:-1], Replicate() if whole else Shard(0)]
    return zeros(size, dtype=dtype, device_mesh=parameter.device_mesh, placements=places)
