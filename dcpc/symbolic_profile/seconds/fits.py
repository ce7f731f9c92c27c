"""Fits of a calibration: seconds of each class of calls, and of collectives, on a real device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BeforeValidator, Field, PlainSerializer, PlainValidator

from dcpc.ir import Work

_DTYPES = {str(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


def _dtype(name: Any) -> torch.dtype:
    if name not in _DTYPES:
        raise ValueError(f"{name!r} where a dtype of torch belongs")
    return _DTYPES[name]


# As in the file of a calibration, whose reader refuses others.
Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Dtype = Annotated[torch.dtype, PlainValidator(_dtype), PlainSerializer(str)]
Rates = Annotated[
    tuple[tuple[Dtype, Rate], ...],
    BeforeValidator(lambda rates: tuple(rates.items())),
    PlainSerializer(lambda rates: {str(dtype): rate for dtype, rate in rates}),
]

# Slope below the first knot at most: FLOPs grow with the square of a length, FLOPs a byte with the
# length, so this is a call that takes as long however short it is.
_STEEPEST = -2.0


@dataclass(frozen=True, slots=True)
class CallKind:
    """Properties of a call, besides FLOPs and bytes, that its seconds depend on; as in `Work`."""

    op_class: str
    forward: bool
    dtype: torch.dtype
    ranks: int = 1
    op: str = ""
    messages: int = 1


@dataclass(frozen=True, slots=True)
class ClassFit:
    """Seconds of one call of a class: launch_s + FLOPs * s_per_flop + bytes * s_per_byte.

    Bytes beyond `near_bytes` cost `s_per_far_byte` more: they no longer lie in a cache.

    Attributes:
        op_class: class of ops, as in `ir.Work`.
        forward: whether of the forward graph; backward's products read transposed operands.
        dtype: element type.
        launch_s: minimum seconds of a call, its share of the views around it included.
        s_per_flop: seconds a FLOP; 0 for classes bound by memory alone.
        s_per_byte: seconds a byte; 0 for classes bound by arithmetic alone.
        near_bytes: bytes of a call beyond which bytes cost more.
        s_per_far_byte: seconds of such a byte in addition to `s_per_byte`.
        knots: (FLOPs a byte, seconds a FLOP), ascending, in place of all of these but `launch_s`,
            with straight lines between the logarithms: attention's kernel takes larger blocks at
            longer lengths; below the first the line goes on, where calls take ever more a FLOP;
            () for other classes.
    """

    op_class: str
    forward: bool
    dtype: Dtype
    launch_s: Number
    s_per_flop: Number = 0.0
    s_per_byte: Number = 0.0
    near_bytes: Number = 0.0
    s_per_far_byte: Number = 0.0
    knots: tuple[tuple[Rate, Rate], ...] = ()

    def busy_s(self, flops: Any, moved: Any) -> Any:
        """Returns a call's seconds without `launch_s`: a number, or an array of them."""
        if not self.knots:
            far = np.maximum(moved - self.near_bytes, 0.0)
            return flops * self.s_per_flop + moved * self.s_per_byte + far * self.s_per_far_byte
        at, value = np.log(np.array(self.knots).T)
        intensity = np.log(np.maximum(flops, 1.0) / np.maximum(moved, 1.0))
        rate = np.interp(intensity, at, value)
        if len(at) > 1:
            slope = (value[1] - value[0]) / (at[1] - at[0])
            rate += np.clip(slope, _STEEPEST, 0.0) * np.minimum(intensity - at[0], 0.0)
        return flops * np.exp(rate)


@dataclass(frozen=True, slots=True)
class CollectiveFit:
    """Seconds of one collective: alpha_s + bytes sent * s_per_byte, its local copies included.

    Attributes:
        op: name, such as "dcpc::all_to_all".
        ranks: ranks of the group.
        alpha_s: minimum seconds.
        s_per_byte: seconds for each byte that this rank sends.
    """

    op: str
    ranks: int
    alpha_s: Number
    s_per_byte: Rate


@dataclass(frozen=True, slots=True, eq=False)
class Fits:
    """All fits of one calibration; two are equal only if they are the same object.

    Attributes:
        classes: one for each class, direction and dtype that was met.
        collectives: one for each collective and group size.
        flops_per_s: (dtype, FLOP/s) that products really had.
        memory_bytes_per_s: bytes that calls bound by memory really moved in a second.
        launch_s: median over the classes.
        error: median relative error of the fits' seconds of whole runs at the calibrated sizes.
    """

    classes: tuple[ClassFit, ...]
    collectives: tuple[CollectiveFit, ...]
    flops_per_s: Rates
    memory_bytes_per_s: Number
    launch_s: Number
    error: Number

    def of(self, call: CallKind | Work) -> ClassFit | None:
        """Returns the fit for a call; of its other direction or another dtype where it has none.

        None for a class that calibration did not meet.
        """
        return nearest(self.classes, call.op_class, call.forward, call.dtype)

    def collective(self, op: str, ranks: int) -> CollectiveFit | None:
        """Returns a collective's fit, that of the nearest group size; None if it has none."""
        same = [f for f in self.collectives if f.op == op]
        return min(same, key=lambda f: abs(f.ranks - ranks), default=None)


def nearest(
    classes: Iterable[ClassFit], op_class: str, forward: bool, dtype: torch.dtype
) -> ClassFit | None:
    """Returns the fit of a class, of this dtype and then of this direction if there is one."""
    same = [f for f in classes if f.op_class == op_class]
    return min(same, key=lambda f: (f.dtype != dtype, f.forward != forward), default=None)
