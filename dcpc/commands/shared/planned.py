"""A plan from a command line's arguments: a model, a file of buckets or lengths, options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from dcpc.api import cut_with, plan_with
from dcpc.buckets import Buckets
from dcpc.commands.shared.factories import load_model
from dcpc.commands.shared.first_look import first_look
from dcpc.compiled.pipeline import CutModel
from dcpc.errors import BucketError, PlanError, TraceError
from dcpc.plan.options import PlanOptions
from dcpc.plan.planning import Planned
from dcpc.plan.progress_bar import during

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model and its shapes as a command line names them.

    Attributes:
        factory: `module:factory` of the model.
        file: file of the buckets.
        seq: lengths such as "512,2048", in place of a file.

    Raises:
        BucketError: not exactly one of `file` and `seq` is given.
    """

    factory: str
    file: Path | None
    seq: str | None = None

    def __post_init__(self) -> None:
        """Checks that the shapes are given once."""
        if (self.file is None) == (self.seq is None):
            got = "neither" if self.file is None else "both"
            raise BucketError(
                f"got {got} of --buckets and --seq; expected one of them: a file with inputs and "
                "sizes, or for a first look at a model of token ids its lengths, such as "
                "--seq 512,2048"
            )

    def planned(self, options: PlanOptions, *, partly: bool = False) -> tuple[Planned, str]:
        """Returns the plan, and a text of the inputs assumed for the model; "" with a file.

        Args:
            options: options of the plan.
            partly: whether buckets that fit with no setting are left without a plan.

        Raises:
            DcpcError: the factory, the shapes or an option is wrong, or a bucket does not fit.
        """
        return self._asked(lambda m, b: plan_with(m, b, options, partly=partly))

    def cut(self, options: PlanOptions, stages: int) -> tuple[CutModel, str]:
        """Returns the model in stages, and a text of the inputs assumed for it.

        Args:
            options: options of the plan; its ranks are those of all pipelines.
            stages: number of stages of a pipeline.

        Raises:
            DcpcError: as from `planned`, or an option does not go with stages.
        """
        return self._asked(lambda m, b: cut_with(m, b, options, stages))

    def _asked(self, make: Callable[[nn.Module, Buckets], T]) -> tuple[T, str]:
        buckets = None if self.file is None else Buckets.from_yaml(self.file)
        try:
            with torch.device("meta"), during(f"make {self.factory}"):
                model = load_model(self.factory)  # no memory for weights, where its code allows it
        except PlanError:
            return self._made(self._load(), buckets, make)
        try:
            return self._made(model, buckets, make)
        except (NotImplementedError, RuntimeError, TraceError):
            pass
        return self._made(self._load(), buckets, make)

    def _load(self) -> nn.Module:
        with during(f"make {self.factory}"):
            return load_model(self.factory)

    def _made(
        self, model: nn.Module, buckets: Buckets | None, make: Callable[[nn.Module, Buckets], T]
    ) -> tuple[T, str]:
        if buckets is not None:
            return make(model, buckets), ""
        look = first_look(model, self.seq or "")
        try:
            return make(model, look.buckets), look.said
        except TraceError as error:
            raise TraceError(
                f"{error}\n\n{look.said}where that is wrong, correct it and pass it as --buckets"
            ) from error
