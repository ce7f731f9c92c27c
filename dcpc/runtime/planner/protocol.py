"""What the loader and the train step need of a compiled model, and no more."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from dcpc.buckets import Bucket, Buckets
from dcpc.ir import BucketPlan, Packable, PlanRow, ValueRange
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.planner.own_lengths import OwnLengths
from dcpc.runtime.planner.plans import StepPlan


class Source(Protocol):
    """Where plan tables come from."""

    @property
    def plans(self) -> Mapping[Bucket, BucketPlan]:
        """The setting of each bucket: what the modes "intra" and "inter" run."""

    @property
    def tables(self) -> Mapping[Bucket, Sequence[PlanRow]]:
        """Every setting of each bucket: what the modes "auto" and "evolve" choose from."""

    @property
    def block(self) -> int:
        """Ranks that wait for each other after each micro-batch; 0: none do."""


class BatchPlanner(Protocol):
    """What plans global batches of a model that runs in stages."""

    def plan(self, samples: Sequence[tuple[int, Bucket]], table: str) -> StepPlan:
        """Returns the plan of a batch.

        Args:
            samples: id and bucket of each.
            table: hash of the plan table, for the plan to carry.
        """


class Compiled(Source, Protocol):
    """A model compiled for some buckets on some ranks."""

    @property
    def buckets(self) -> Buckets:
        """The shape buckets and the input specs."""

    @property
    def packable(self) -> Packable:
        """What its model makes of several sequences in one row."""

    @property
    def value_ranges(self) -> Mapping[Bucket, Mapping[str, tuple[ValueRange, ...]]]:
        """What its ops need of integer inputs, by bucket and input; those left out may be any."""

    def division_problems(
        self, weigh: Callable[[Mapping[str, Tensor]], float] | None, pad: Mapping[str, int | float]
    ) -> Mapping[str, str]:
        """Returns what a sample's loss depends on besides the sample, each with why."""

    def packing_problem(
        self,
        cases: Callable[[Mapping[str, Tensor]], list[Mapping[str, Tensor]]],
        weigh: Callable[[Mapping[str, Tensor]], float],
    ) -> str:
        """Returns how packed rows have another loss than their sequences; "": they have not."""

    def own_lengths(self, multiple: int | None) -> OwnLengths:
        """Returns at which lengths besides its buckets' its graphs run, and how long that takes.

        Args:
            multiple: what lengths are rounded up to; None: what suits the device.
        """

    @property
    def groups(self) -> Groups:
        """The process groups."""

    @property
    def node_ranks(self) -> int:
        """Ranks of a node."""

    @property
    def speeds(self) -> tuple[float, ...]:
        """How fast ranks are beside the fastest one; nothing: all alike."""

    @property
    def batch_planner(self) -> BatchPlanner | None:
        """What plans batches where the model runs in stages; None: it does not."""

    @property
    def replans(self) -> int:
        """How often rows of the tables were replaced by others."""
