"""Folders of checkpoints: written under another name, renamed once whole, checked before use.

DIR/step-00000120/checkpoint.json   what is here: size and SHA-256 of each file, every tensor
                  __0_0.distcp      tensors that rank 0 has written, and so on
                  .metadata         for torch.distributed.checkpoint; not read here
                  state.pt          loader, scheduler, extra, seeds
DIR/.step-00000130-tmp/             not whole, and never read
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from dcpc.errors import CheckpointError

MANIFEST = "checkpoint.json"
FORMAT = 1
_WHOLE = re.compile(r"step-(\d{8,})")
_LEFT = re.compile(r"\.step-(\d{8,})-(?:tmp|old)")
_SHOWN = 5  # names beside a folder that is not there
_FIELDS = {"format", "step", "world", "parameters", "optimizer", "files", "tensors"}


def final_folder(directory: Path, step: int) -> Path:
    """Returns the path of a step's checkpoint after it is complete."""
    return directory / f"step-{step:08d}"


def unfinished_folder(directory: Path, step: int) -> Path:
    """Returns the path of a step's checkpoint while it is written."""
    return directory / f".step-{step:08d}-tmp"


def found_in(directory: Path) -> list[Path]:
    """Returns the folders of checkpoints, that of the largest step first; whole or damaged.

    One that was set aside for another of its step, and is alone now, counts.
    """
    if not directory.is_dir():
        if directory.exists():
            raise CheckpointError(
                f"load({str(directory)!r}): got a file; expected a folder of checkpoints; name that"
            )
        return []
    steps: dict[int, Path] = {}
    for entry in directory.iterdir():
        if found := _WHOLE.fullmatch(entry.name):
            steps[int(found[1])] = entry
        elif entry.name.endswith("-old") and (found := _LEFT.fullmatch(entry.name)):
            steps.setdefault(int(found[1]), entry)
    return [steps[n] for n in sorted(steps, reverse=True)]


def in_place_of_one(directory: Path) -> tuple[str, bool]:
    """Describes a place without checkpoints, and says whether one may be created there."""
    if (directory / MANIFEST).is_file():
        return f"a checkpoint, which {str(directory.parent)!r} holds", False
    whole = directory.absolute()
    place = next(folder for folder in (whole, *whole.parents) if folder.is_dir())
    there = place == whole
    try:
        entries = {e.name: e for e in sorted(place.iterdir()) if there or e.is_dir()}
    except OSError:
        entries = {}  # it may be read no further
    near = [*entries][:_SHOWN]
    if not there:
        wanted = whole.parts[len(place.parts)]
        near = difflib.get_close_matches(wanted, entries, n=_SHOWN, cutoff=0.0)
    told = [_with_newest(entries[name]) for name in near]
    told += [f"{len(entries) - len(near)} more"] * (len(entries) > len(near))
    head = "a folder without a whole checkpoint" if there else "no such folder"
    none = "nothing" if there else "no folder"
    return f"{head} ({str(place)!r} holds {', '.join(told) or none})", True


def _with_newest(entry: Path) -> str:
    with contextlib.suppress(CheckpointError, OSError):
        if inside := found_in(entry):
            return f"{entry.name!r} with {inside[0].name}"
    return repr(entry.name)


def begin(directory: Path, step: int) -> Path:
    """Creates an empty folder for a step's checkpoint, and removes leftovers of crashes.

    Raises:
        OSError: the folder cannot be created.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for entry in list(directory.iterdir()):
        if entry.name.endswith("-tmp") and _LEFT.fullmatch(entry.name):
            shutil.rmtree(entry)
    made = unfinished_folder(directory, step)
    made.mkdir()
    return made


def publish(directory: Path, step: int) -> None:
    """Renames a complete folder to its final name, in place of an older checkpoint of that step."""
    made, final = unfinished_folder(directory, step), final_folder(directory, step)
    old = directory / f".step-{step:08d}-old"
    _sync(made)
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    made.rename(final)
    _sync(directory)
    shutil.rmtree(old, ignore_errors=True)


def prune(directory: Path, step: int, keep: int, damaged: Collection[Path]) -> None:
    """Removes old whole checkpoints up to a step, except the newest `keep`.

    Args:
        directory: folder of the checkpoints.
        step: step of the checkpoint written last, which stays.
        keep: number of checkpoints that stay.
        damaged: damaged checkpoints: they are not counted, and stay.
    """
    whole = []
    for folder in found_in(directory):
        if folder in damaged:
            continue
        with contextlib.suppress(CheckpointError, OSError):
            manifest = read_manifest(folder)
            sized = all((folder / n).stat().st_size == f["bytes"]
                        for n, f in manifest["files"].items())  # fmt: skip
            if sized and manifest["step"] <= step:
                whole.append(folder)
    for folder in whole[keep:]:
        # Renamed first: what is removed by half is no checkpoint any more.
        gone = directory / f".{folder.name.removeprefix('.').removesuffix('-old')}-tmp"
        folder.rename(gone)
        shutil.rmtree(gone)


def fingerprint(file: Path) -> dict[str, Any]:
    """Returns the size in bytes and the SHA-256 of a file."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return {"bytes": stream.tell(), "sha256": digest}


def write_bytes(file: Path, content: bytes) -> None:
    """Writes a file and waits until it is on the disk."""
    with file.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Writes the manifest of a checkpoint, with a checksum of its content."""
    text = _canonical(content)
    whole = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "content": content}
    write_bytes(folder / MANIFEST, _canonical(whole).encode())


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns the manifest of a checkpoint, checked against its checksum.

    Raises:
        CheckpointError: the manifest is missing or damaged.
    """
    try:
        read = json.loads((folder / MANIFEST).read_bytes())
        content = read["content"]
        same = hashlib.sha256(_canonical(content).encode()).hexdigest() == read["sha256"]
        known = content["format"] == FORMAT and content.keys() >= _FIELDS
        inside = all(Path(name).name == name for name in content["files"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise CheckpointError(f"{MANIFEST}: {type(e).__name__}: {e}") from e
    if not same:
        raise CheckpointError(f"{MANIFEST}: its checksum is another than when it was written")
    if not known:
        raise CheckpointError(f"{MANIFEST}: its format is {content['format']}, not {FORMAT}")
    if not inside:
        raise CheckpointError(f"{MANIFEST}: it names files of other folders")
    return dict(content)


def fault_of(folder: Path, files: Mapping[str, Any], names: Iterable[str]) -> str:
    """Returns the fault of the first changed file, or "" where all are as written."""
    for name in names:
        expected = files[name]
        try:
            got = fingerprint(folder / name)
        except OSError as e:
            return f"{name}: {e.strerror or e}"
        if got["bytes"] != expected["bytes"]:
            return f"{name}: got {got['bytes']} bytes; expected {expected['bytes']}"
        if got["sha256"] != expected["sha256"]:
            return f"{name}: got SHA-256 {got['sha256'][:12]}...; expected another"
    return ""


def _canonical(content: Any) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
