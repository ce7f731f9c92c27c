"""Protocols: the parts of a compiled model that the loader and the train step use."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from dcpc.buckets import Bucket, Buckets
from dcpc.ir import BucketPlan, Packable, PlanRow, ValueRange
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.planner.own_lengths import BatchLengths, OwnLengths
from dcpc.runtime.planner.plans import StepPlan


class Source(Protocol):
    """A source of plan tables."""

    @property
    def plans(self) -> Mapping[Bucket, BucketPlan]:
        """The setting of each bucket, which the modes "intra" and "inter" run."""

    @property
    def tables(self) -> Mapping[Bucket, Sequence[PlanRow]]:
        """Every setting of each bucket, for the modes "auto" and "evolve" to choose from."""

    @property
    def block(self) -> int:
        """Ranks that wait for each other after each micro-batch; 0: none do."""


class BatchPlanner(Protocol):
    """Planner of global batches of a model that runs in stages."""

    def plan(
        self,
        samples: Sequence[tuple[int, Bucket]],
        table: str,
        lengths: BatchLengths | None = None,
    ) -> StepPlan:
        """Returns the plan of a batch.

        Args:
            samples: id and bucket of each sample.
            table: hash of the plan table, for the plan to carry.
            lengths: at which samples are run; None: at their buckets'.
        """


class Compiled(Source, Protocol):
    """A model compiled for some buckets on some ranks."""

    @property
    def buckets(self) -> Buckets:
        """The shape buckets and the input specs."""

    @property
    def packable(self) -> Packable:
        """Whether, and how, its model takes several sequences in one row."""

    @property
    def value_ranges(self) -> Mapping[Bucket, Mapping[str, tuple[ValueRange, ...]]]:
        """Valid values of integer inputs, by bucket and input; those left out may have any."""

    def division_problems(
        self, weigh: Callable[[Mapping[str, Tensor]], float] | None, pad: Mapping[str, int | float]
    ) -> Mapping[str, str]:
        """Returns each thing besides the sample that a sample's loss depends on, with a reason."""

    def packing_problem(
        self,
        cases: Callable[[Mapping[str, Tensor]], list[Mapping[str, Tensor]]],
        weigh: Callable[[Mapping[str, Tensor]], float],
    ) -> str:
        """Returns the difference of packed rows' loss from their sequences'; "": there is none."""

    def own_lengths(self, multiple: int | None) -> OwnLengths:
        """Returns the lengths besides its buckets' at which its graphs run, and their seconds.

        Args:
            multiple: divisor of the lengths, as far as buckets have room; None: the device's
                default.
        """

    @property
    def groups(self) -> Groups:
        """The process groups."""

    @property
    def node_ranks(self) -> int:
        """Ranks of a node."""

    @property
    def speeds(self) -> tuple[float, ...]:
        """Speed of each rank beside the fastest one; nothing: all are equal."""

    @property
    def batch_planner(self) -> BatchPlanner | None:
        """Planner of batches where the model runs in stages; None: it does not."""

    @property
    def replans(self) -> int:
        """Number of times that rows of the tables were replaced."""
