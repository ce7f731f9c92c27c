"""A calibration as a JSON file, and the refusal of one for something else."""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from dcpc.errors import ProfileError
from dcpc.symbolic_profile.seconds.fits import ClassFit, CollectiveFit, Fits

VERSION = 3  # since 2 with a digest of all else, since 3 with the price of far bytes
_DTYPES = {str(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


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
        """Returns a text for each field that is not as wanted.

        Args:
            wanted: key of the plan that is to use the calibration.
            anywhere: whether the plan is for another machine.
        """
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
    measured_s: float
    predicted_s: float


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
    seconds_s: float

    def write(self, file: str | Path) -> None:
        """Writes the file."""
        fits = {
            "classes": [{**asdict(c), "dtype": str(c.dtype)} for c in self.fits.classes],
            "collectives": [asdict(c) for c in self.fits.collectives],
            "flops_per_s": {str(dtype): rate for dtype, rate in self.fits.flops_per_s},
            "memory_bytes_per_s": self.fits.memory_bytes_per_s,
            "launch_s": self.fits.launch_s,
            "error": self.fits.error,
        }
        data = {
            "version": VERSION,
            "key": asdict(self.key),
            "fits": fits,
            "points": [{**asdict(p), "sizes": dict(p.sizes)} for p in self.points],
            "seconds_s": self.seconds_s,
        }
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
                found = _calibration(data)
                digest = data.pop("digest")
        except OSError as e:
            raise ProfileError(
                f"calibration {file}: got {e.strerror}; expected a file that `dcpc calibrate` "
                "wrote; name one"
            ) from e
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise ProfileError(
                f"calibration {file}: got {type(e).__name__} {e}; expected what `dcpc calibrate` "
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

        Args:
            wanted: key of the plan that is to use it.
            anywhere: whether the plan is for another machine.

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


def _calibration(data: Mapping[str, Any]) -> Calibration:
    fits = data["fits"]
    key = dict(data["key"])
    return Calibration(
        key=CalibrationKey(**{**key, "graphs": tuple(key["graphs"])}),
        fits=Fits(
            classes=tuple(_class_fit(c) for c in fits["classes"]),
            collectives=tuple(_collective_fit(c) for c in fits["collectives"]),
            flops_per_s=tuple(
                (_dtype(name), _positive(r)) for name, r in fits["flops_per_s"].items()
            ),
            memory_bytes_per_s=_number(fits["memory_bytes_per_s"]),
            launch_s=_number(fits["launch_s"]),
            error=_number(fits["error"]),
        ),
        points=tuple(
            CalibratedPoint(
                {str(n): int(s) for n, s in p["sizes"].items()},
                _number(p["measured_s"]),
                _number(p["predicted_s"]),
            )
            for p in data["points"]
        ),
        seconds_s=_number(data["seconds_s"]),
    )


def _class_fit(c: Mapping[str, Any]) -> ClassFit:
    return ClassFit(
        op_class=str(c["op_class"]),
        forward=bool(c["forward"]),
        dtype=_dtype(c["dtype"]),
        launch_s=_number(c["launch_s"]),
        s_per_flop=_number(c["s_per_flop"]),
        s_per_byte=_number(c["s_per_byte"]),
        near_bytes=_number(c["near_bytes"]),
        s_per_far_byte=_number(c["s_per_far_byte"]),
        knots=tuple((_positive(x), _positive(y)) for x, y in c["knots"]),
    )


def _collective_fit(c: Mapping[str, Any]) -> CollectiveFit:
    alpha_s, s_per_byte = _number(c["alpha_s"]), _positive(c["s_per_byte"])
    return CollectiveFit(str(c["op"]), int(c["ranks"]), alpha_s, s_per_byte)


def _number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{value} where a number from 0 up belongs")
    return number


def _positive(value: Any) -> float:
    if not _number(value) > 0:
        raise ValueError(f"{value} where a number above 0 belongs")
    return float(value)


def _dtype(name: Any) -> torch.dtype:
    if name not in _DTYPES:
        raise ValueError(f"{name!r} where a dtype of torch belongs")
    return _DTYPES[name]


def _text(value: Any) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)
