"""A calibration as a JSON file, and the refusal of one for something else."""

from __future__ import annotations

import functools
import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from dcpc.errors import ProfileError
from dcpc.symbolic_profile.seconds.fits import Fits, Number

VERSION = 3  # since 2 with a digest of all else, since 3 with the price of far bytes


@dataclass(frozen=True, slots=True)
class CalibrationKey:
    """Model, device and settings that a calibration holds for.

    Attributes:
        device: name in the table of devices.
        machine: name of the real device, with the threads that an op of the CPU runs on.
        world: ranks that the collectives were measured on.
        dtype: dtype of most products.
        backend: "eager" or "inductor".
        torch: version of torch, which brings the kernels.
        graphs: hash of each trace of the model.
    """

    device: str
    machine: str
    world: int
    dtype: str
    backend: str
    torch: str
    graphs: tuple[str, ...]

    def differences(self, wanted: CalibrationKey, anywhere: bool) -> list[str]:
        """Returns a text for each field that is not as wanted."""
        skipped = {"machine"} if anywhere else set()
        return [
            f"{_WORDS.get(f.name, f.name)} {_text(getattr(self, f.name))} (expected "
            f"{_text(getattr(wanted, f.name))})"
            for f in fields(self)
            if f.name not in skipped and getattr(self, f.name) != getattr(wanted, f.name)
        ]


_WORDS = {"graphs": "another model, of graph hash", "world": "world size"}


@dataclass(frozen=True, slots=True)
class CalibratedPoint:
    """One size at which two blocks of the model ran.

    Attributes:
        sizes: dim -> size, batch included.
        measured_s: seconds of forward and backward.
        predicted_s: seconds by the fits.
    """

    sizes: Mapping[str, int]
    measured_s: Number
    predicted_s: Number


@dataclass(frozen=True, slots=True)
class Calibration:
    """Result of `dcpc calibrate`.

    Attributes:
        key: model, device and settings it holds for.
        fits: seconds of each class of calls and of collectives.
        points: measured points, with the error of the fits at each.
        seconds_s: seconds that calibrating took.
    """

    key: CalibrationKey
    fits: Fits
    points: tuple[CalibratedPoint, ...]
    seconds_s: Number

    def write(self, file: str | Path) -> None:
        """Writes the file."""
        data = {"version": VERSION, **_file().dump_python(self, mode="json")}
        data["digest"] = _digest(data)
        path = Path(file)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        except OSError as e:
            raise ProfileError(
                f"calibration {file}: got {e.strerror or e}; expected to write it; look at the "
                "disk's space and rights, or name another file"
            ) from e

    @classmethod
    def read(cls, file: str | Path) -> Calibration:
        """Returns the calibration in a file that `write` wrote.

        Raises:
            ProfileError: there is no such file, it has another version or is no calibration, or it
                was edited.
        """
        try:
            data = json.loads(Path(file).read_text(encoding="utf-8"))
            version = data["version"]
            if version == VERSION:
                found = _file().validate_python(data)
                digest = data.pop("digest")
        except OSError as e:
            raise ProfileError(
                f"calibration {file}: got {e.strerror}; expected a file that `dcpc calibrate` "
                "wrote; name one"
            ) from e
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            first = e.errors()[0] if isinstance(e, ValidationError) else None
            said = f"{type(e).__name__} {e}" if first is None else _problem(first)
            raise ProfileError(
                f"calibration {file}: got {said}; expected what `dcpc calibrate` "
                "wrote; run it again"
            ) from e
        if version != VERSION:
            raise ProfileError(
                f"calibration {file}: got version {version}; expected {VERSION}; run `dcpc "
                "calibrate` again"
            )
        if digest != _digest(data):
            raise ProfileError(
                f"calibration {file}: got contents of digest {_digest(data)}; expected {digest}, "
                "as it was written: it was edited since; run `dcpc calibrate` again"
            )
        return found

    @classmethod
    def of(cls, given: str | Path | Calibration | None) -> Calibration | None:
        """Returns the calibration itself, or that of a file; None for none."""
        return given if given is None or isinstance(given, Calibration) else cls.read(given)

    def check(self, wanted: CalibrationKey, anywhere: bool = False) -> None:
        """Refuses a calibration of something else.

        Raises:
            ProfileError: names each difference.
        """
        found = self.key.differences(wanted, anywhere)
        if found:
            raise ProfileError(
                f"calibration: got one of {'; '.join(found)}; run `dcpc calibrate` again for this "
                "model and these ranks, plan with the options it was measured with, or without it"
            )


def machine(device: torch.device) -> str:
    """Returns the name of the real device: the GPU; the processor and torch's threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {torch.get_num_threads()} threads"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _digest(data: Mapping[str, Any]) -> str:
    """Returns a digest of contents, however they are laid out in the file."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


@functools.cache
def _file() -> TypeAdapter[Calibration]:
    """Returns the reader and writer of a file's data; made when the first file is met."""
    return TypeAdapter(Calibration)


def _problem(error: Mapping[str, Any]) -> str:
    return f"{'.'.join(map(str, error['loc']))}: {error['msg']}"


def _text(value: Any) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)
