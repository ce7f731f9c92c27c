"""From a planned batch to the step of one rank: the samples that it runs, loaded and weighed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial

import torch

from dcpc.buckets import BATCH
from dcpc.errors import DataError, DcpcError
from dcpc.runtime.data.arguments import check_choices
from dcpc.runtime.data.cuts import PlannedBatch
from dcpc.runtime.data.packing import POSITIONS, RowMaker
from dcpc.runtime.data.samples import Dataset, Samples
from dcpc.runtime.data.steps import MicroBatch, Step, pinned
from dcpc.runtime.data.weights import Weight, weighed, weight_function
from dcpc.runtime.groups.agreement import agree
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.planner.plans import PlannedMicroBatch, StepPlan
from dcpc.runtime.planner.protocol import Compiled
from dcpc.runtime.values import not_numbers, out_of_range

LOG = logging.getLogger("dcpc")
AUTO = "auto"  # `packing=`: where it is exact, and predicted to gain
# What a loss may depend on besides its samples, where `loss_depends_on=` says so.
DEPENDS_ON = ("micro_batch", "padding", "row")


def agreed_maker(groups: Groups, make: Callable[[], StepMaker]) -> StepMaker:
    """Returns the maker of steps, once all ranks have one.

    Raises:
        DcpcError: a rank cannot make it; the first such error, on every rank.
    """
    made: StepMaker | None = None
    problem: DcpcError | None = None
    try:
        made = make()
    except DcpcError as error:
        problem = error
    agree(groups, groups.world, "DataLoader", "", problem)
    assert made is not None, "no rank has a problem"
    return made


def chosen_maker(
    compiled: Compiled, packing: bool | str, make: Callable[[bool | str], StepMaker]
) -> StepMaker:
    """Returns the maker of steps, once all ranks have one; it packs as asked for, if it can.

    Args:
        compiled: the compiled model.
        packing: argument of the loader. "auto": by the input that the model tells sequences apart
            by; where packing is refused steps are not packed, and the log says why.
        make: function that returns a rank's maker with that packing, "auto" left out.

    Raises:
        DcpcError: a rank cannot make it; the first such error, on every rank.
    """
    groups = compiled.groups
    if packing != AUTO:
        return agreed_maker(groups, partial(make, packing))
    marks = [name for name in compiled.packable.marks if name != POSITIONS]
    try:
        return agreed_maker(groups, partial(make, marks[0] if marks else True))
    except DataError as refused:
        made = agreed_maker(groups, partial(make, False))
        if groups.rank == 0:
            LOG.warning(
                "packing='auto': steps are not packed, and samples have all inputs, as: %s", refused
            )
        return made


class StepMaker:
    """Loads one rank's micro-batches of a planned batch."""

    def __init__(
        self,
        dataset: Dataset,
        compiled: Compiled,
        packing: bool | str,
        weight: Weight,
        pad: Mapping[str, int | float] | None,
        check_values: bool,
        pads_longer: bool,
        loss_depends_on: str | Collection[str] = (),
    ) -> None:
        """Checks the arguments against the model; they are the loader's.

        Rank 0 alone asks the model about its loss.

        Raises:
            DataError: an argument is wrong, the model would mix sequences that are packed, or a
                sample's loss depends on more than the sample.
        """
        allowed = check_choices("loss_depends_on", loss_depends_on, DEPENDS_ON)
        buckets = compiled.buckets
        self._inputs = buckets.inputs
        self._rows = RowMaker(buckets, packing, compiled.packable, weight, pad) if packing else None
        given = buckets if self._rows is None else self._rows.given(buckets)
        self.samples = Samples(dataset, given, pad)
        self._weigh = weight_function(weight, buckets.inputs)
        if compiled.groups.rank == 0:
            for name, problem in self._dependences(compiled, pad or {}).items():
                if name not in allowed:
                    raise DataError(
                        f"DataLoader(weight={weight!r}): {problem} is trained as it is with "
                        f"loss_depends_on='{name}'"
                    )
        self._rank, self._device = compiled.groups.rank, compiled.groups.device
        self._pads_longer = pads_longer
        self._alone = compiled.groups.control(compiled.groups.world) is None
        self._ranges = compiled.value_ranges if check_values else None

    @property
    def packs(self) -> bool:
        """Whether samples are laid into rows."""
        return self._rows is not None

    def _dependences(self, compiled: Compiled, pad: Mapping[str, int | float]) -> Mapping[str, str]:
        """Returns each thing besides the sample that its loss depends on, with a reason."""
        rows, weigh = self._rows, self._weigh
        if rows is None:
            return compiled.division_problems(weigh, pad)
        assert weigh is not None, "a row has any number of samples"
        problem = compiled.packing_problem(rows.examples, lambda x: weigh(rows.counted(x)))
        return {"row": problem} if problem else {}

    def step(
        self, epoch: int, cut: PlannedBatch, again: Callable[[StepPlan], PlannedBatch]
    ) -> Step | None:
        """Returns this rank's step; None where the batch is empty. Its samples are forgotten.

        A rank alone raises the error of a wrong sample. Among others it puts it into the step: they
        wait for this rank in `train_step`, and learn of it there.
        """
        plan = cut.plan
        step = None if plan is None else self._step(epoch, cut, plan)
        if step is not None and plan is not None:

            def anew() -> Step:
                found = self.step(epoch, again(plan), again)
                assert found is not None, "the same samples"
                return found

            step = replace(step, again=anew)
        done = () if cut.plan is None else cut.plan.micro_batches
        self.samples.forget(cut.ids(mb.sample_ids for mb in done))
        self.samples.forget(cut.skipped)
        return step

    def _step(self, epoch: int, cut: PlannedBatch, plan: StepPlan) -> Step:
        mine = [(n, mb) for n, mb in enumerate(plan.micro_batches) if self._rank in mb.ranks]
        total = float(cut.samples) if self._weigh is None else None
        made: tuple[MicroBatch, ...] = ()
        problem: DcpcError | None = None
        try:
            made = tuple(self._micro_batch(cut, n, mb) for n, mb in mine)
        except DcpcError as error:
            if self._alone:
                raise
            problem = error
        return Step(
            epoch, cut.index, plan.packed(cut.rows), made, total, cut.tokens, cut.samples,
            cut.plan_s, cut.rows, problem,
        )  # fmt: skip

    def _micro_batch(self, cut: PlannedBatch, number: int, mb: PlannedMicroBatch) -> MicroBatch:
        ids = cut.ids([mb.sample_ids])
        rows = tuple(cut.rows[row] for row in mb.sample_ids) if cut.rows else ()
        if self._rows is None:
            if not self._alone:
                for i in ids:
                    self.samples.load(i)
                self.samples.refuse_other(ids, mb.bucket, mb.shape, self._pads_longer)
            inputs = self.samples.collate(ids, mb.shape)
        else:
            inputs = self._rows.collate(self.samples, rows, mb.shape)
        self._check_values(inputs, cut, mb)
        weight = float(len(ids)) if self._weigh is None else weighed(self._weigh, inputs, ids)
        return MicroBatch(
            bucket=mb.bucket,
            sp=mb.sp,
            inputs=pinned(inputs, self._device),
            weight=weight,
            samples=ids,
            ranks=mb.ranks,
            micro_batch=mb.micro_batch,
            menu_step=mb.menu_step,
            number=number,
            rows=rows,
        )

    def _check_values(
        self, inputs: Mapping[str, torch.Tensor], cut: PlannedBatch, mb: PlannedMicroBatch
    ) -> None:
        """Refuses inputs that the model's ops cannot take: here no step waits for the check."""
        if self._ranges is None:
            return
        wrong = out_of_range(inputs, self._ranges.get(mb.bucket, {})) or not_numbers(inputs)
        if wrong is None:
            return
        spec = self._inputs[wrong.name]
        at = next((a for a, dim in zip(wrong.at, spec.dims, strict=True) if dim.name == BATCH), 0)
        own = cut.ids([mb.sample_ids[at : at + 1]])
        raise DataError(f"sample{'s' * (len(own) > 1)} {', '.join(map(str, own[:8]))}, {wrong}")
