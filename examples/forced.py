"""Runs a variant other than the planned one: for baselines and measurements, not for training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

import dcpc
from dcpc.ir import BucketPlan, Placement, PlanRow
from dcpc.plan.runnable import Runnable
from dcpc.runtime.planner.own_lengths import OwnLengths
from dcpc.symbolic_profile import Prediction


class ForcedVariant:
    """A model under one placement and one recompute setting, at any batch and length.

    Attributes:
        placement: how it is split over the ranks.
        menu_step: steps of recompute taken.
    """

    def __init__(
        self,
        compiled: dcpc.CompiledModel,
        placement: Placement,
        menu_step: int,
        model: nn.Module | None = None,
        runnable: Runnable | None = None,
    ) -> None:
        """Takes the graphs of a compiled model.

        Args:
            compiled: where the graphs come from.
            placement: one of its placements.
            menu_step: steps of recompute to take.
            model: whose parameters to use; default: those of the compiled model.
            runnable: of which trace; default: of the one there is.
        """
        self.placement, self.menu_step = placement, menu_step
        self._compiled = compiled
        self._runnable = runnable or compiled.runnable
        program, model = self._runnable.traced.program, model or compiled.model
        state = dict(model.named_parameters(remove_duplicate=False))
        state |= dict(model.named_buffers(remove_duplicate=False))
        names = {**program.parameters, **program.buffers}
        self._held = {**program.constants, **{p: state[name] for p, name in names.items()}}

    def __call__(self, **inputs: Tensor) -> Tensor:
        """Returns the loss; the ranks of the placement's SP group pass the same inputs."""
        compiled = self._compiled
        shapes = {n: tuple(x.shape) for n, x in inputs.items()}
        sizes = compiled.buckets.lengths(shapes, {n: x.dtype for n, x in inputs.items()})
        rank = compiled.groups.rank % self.placement.sp
        variant, integers = self._runnable.variant(self.placement, self.menu_step, sizes, rank)
        names = self._runnable.traced.program.inputs
        named = {**self._held, **{p: inputs[n] for p, n in names.items()}}
        return variant([named[p] for p in variant.placeholders], integers)

    def prepare(self, sizes: Mapping[str, int]) -> None:
        """Compiles what runs at some sizes, batch included."""
        rank = self._compiled.groups.rank % self.placement.sp
        self._runnable.variant(self.placement, self.menu_step, sizes, rank)

    def zero_grad(self) -> None:
        """Drops all gradients."""
        for x in self._held.values():
            x.grad = None

    def predict(self, sizes: Mapping[str, int]) -> Prediction:
        """Returns the predicted costs at some sizes, batch included."""
        return self._runnable.priced.at(self.placement).predict(self.menu_step, sizes)


class OwnPlans:
    """What a loader asks of a compiled model, of which each bucket has a setting of its own.

    Attributes:
        plans: the setting of each bucket; there is no other.
    """

    block = replans = 0
    batch_planner: None = None
    speeds: tuple[float, ...] = ()

    def __init__(
        self,
        compiled: dcpc.CompiledModel,
        plans: Mapping[dcpc.Bucket, BucketPlan],
        buckets: dcpc.Buckets | None = None,
    ) -> None:
        """Takes the settings of some buckets.

        Args:
            compiled: whose ranks and inputs they are for.
            plans: of each bucket.
            buckets: to which samples are padded; default: those of the compiled model.
        """
        self.plans = plans
        self.tables: Mapping[dcpc.Bucket, Sequence[PlanRow]] = {}
        self.buckets, self.groups = buckets or compiled.buckets, compiled.groups
        self.node_ranks, self.packable = compiled.node_ranks, compiled.packable
        self.value_ranges = compiled.value_ranges

    def own_lengths(self, multiple: int | None) -> OwnLengths:
        """Returns that samples run at their buckets' lengths alone."""
        return OwnLengths(lambda bucket, sizes: False, None, lambda bucket: bucket.sizes)

    def division_problems(
        self, weigh: Callable[[Mapping[str, Tensor]], float] | None, pad: Mapping[str, int | float]
    ) -> Mapping[str, str]:
        """Returns none: the compiled model's own loader has asked."""
        return {}
