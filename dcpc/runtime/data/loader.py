"""The data-aware loader: from a dataset of ragged samples to planned optimizer steps.

    order of the epoch -> global batch -> StepPlan -> this rank's tensors
                          (window.py)    (step_planner.py)

Rank 0 forms and plans the batches and sends the plans to the others (relay.py); each rank loads
only the samples it runs. Both happen ahead of training, in a thread. A rank whose groups have no
process group plans by itself: the plan depends on dataset, seed, epoch and table alone.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from dcpc.buckets import path_of
from dcpc.errors import (
    DataError,
    DcpcError,
    NoLengthError,
    PlanError,
    bare,
    check_choice,
    checking_call,
    explaining,
)
from dcpc.ir.thresholds import PACKING_GAIN
from dcpc.runtime.data.arguments import (
    allowed_steps,
    check_compiled,
    check_count,
    check_flags,
    check_pad,
    check_reading,
    check_seconds,
    check_stages,
    check_step,
    check_step_size,
)
from dcpc.runtime.data.cuts import PlannedBatch, Recipe, count_steps, cut_epoch
from dcpc.runtime.data.making import AUTO, StepMaker, chosen_maker
from dcpc.runtime.data.progress import Order, Progress, State
from dcpc.runtime.data.reading.ahead import LoaderStats, ahead
from dcpc.runtime.data.reading.handing import Handing
from dcpc.runtime.data.reading.stream import SampleStream, StreamOrder, is_stream
from dcpc.runtime.data.samples import Dataset
from dcpc.runtime.data.steps import Step
from dcpc.runtime.data.weights import SAMPLES, Weight
from dcpc.runtime.data.window import Position
from dcpc.runtime.groups.relay import Relay
from dcpc.runtime.planner.own_lengths import BatchLengths
from dcpc.runtime.planner.packed.bins import PackedPrices
from dcpc.runtime.planner.plan_file import PlanFile
from dcpc.runtime.planner.plans import FREE_MODES, MODES, Mode, StepPlan, step_plan
from dcpc.runtime.planner.protocol import Compiled
from dcpc.runtime.planner.splits.advice import padding_advice
from dcpc.runtime.planner.table import PlanTable, mode_table

LOG = logging.getLogger("dcpc")
T = TypeVar("T")
_UNCOUNTED = (
    "got a stream, whose number of samples is known at its end; expected samples by number; train "
    "for a number of steps: zip(range(steps), loader), or itertools.islice(loader, steps)"
)


class DataLoader:
    """Yields the planned steps of one epoch at a time; every sample exactly once in each.

    An iteration that ends normally moves on to the next epoch. After `load_state_dict` the next
    iteration continues where the state was taken, at any world size; otherwise it starts its epoch
    afresh.
    """

    @checking_call("dcpc.DataLoader", DataError)
    def __init__(
        self,
        dataset: Dataset | Iterable[Mapping[str, Any]],
        compiled: Compiled,
        *,
        tokens_per_step: int | None = None,
        samples_per_step: int | None = None,
        mode: Mode = "auto",
        min_grad_accumulation_steps: int = 1,
        max_grad_accumulation_steps: int | None = None,
        calculate_imbalance: bool = False,
        window: int = 256,
        seed: int = 0,
        shuffle: bool | None = None,
        order: Order | None = None,
        pad: Mapping[str, int | float] | None = None,
        pad_to: Literal["longest", "bucket"] = "longest",
        pad_to_multiple_of: int | None = None,
        pad_to_longer: bool = False,
        packing: bool | str = False,
        weight: Weight = SAMPLES,
        on_too_long: Literal["error", "skip"] = "error",
        lookahead: int = 1,
        num_workers: int = 0,
        plan_timeout_s: float | None = None,
        check_values: bool = True,
        loss_depends_on: str | Collection[str] = (),
    ) -> None:
        """Checks the arguments; loads nothing yet. Collective over all ranks.

        Args:
            dataset: `len()` and `[i]` -> one tensor for each input, without the `batch` dim. If it
                has `dims(i)` -> length of each named dim, samples are not loaded for their lengths;
                else rank 0 loads every one. Or a stream: an iterable of such samples that begins
                anew in each epoch (torch's or datasets' `IterableDataset`, or your own), in its own
                order; rank 0 reads it, and hands each sample to the ranks that run it.
            compiled: the compiled model.
            tokens_per_step: maximum tokens of a global batch (a longer single sample is a step of
                its own); the tokens of a sample are the product of its named dims.
            samples_per_step: samples of a global batch in place of tokens: the next in the epoch's
                order.
            mode: "auto": any row of the plan table for any micro-batch; "evolve": the same, and
                with `packing` the search goes on while the step before runs; "inter": each bucket's
                own setting, buckets mixed and balanced; "intra": one bucket a step, at its own
                setting.
            min_grad_accumulation_steps: minimum of micro-batches of the rank that runs most in a
                step: batches are enlarged beyond `tokens_per_step` until it does. Not in "intra".
            max_grad_accumulation_steps: maximum of the same: batches are cut smaller; None: none.
            calculate_imbalance: whether each step's predicted imbalance, gap and limiting cause are
                logged to the logger "dcpc", on rank 0.
            window: places by which the order of the samples may differ from the epoch's: samples
                that do not fit in a batch wait for the next while others up to so many places after
                them are taken. 0: the exact order.
            seed: seed of the order of samples.
            shuffle: whether each epoch has a new order; else it has the dataset's. Default: it has,
                but a stream's, which has its own.
            order: function from the epoch to the samples in order, each once, alike on all ranks
                (your sampler, or `torch.randperm(n, generator=...)` of your seed), instead of both.
            pad: input name -> value that fills up the end of a sample shorter than its micro-batch.
            pad_to: "longest": each sample is padded to the longest one of its micro-batch, which
                the planner forms of samples of like length. The bucket's degree, placement and
                recompute run it, within the bucket's memory. Where the model's trace does not hold
                (`CompiledModel.own_lengths`), or `pad` lacks an input, samples are padded to their
                buckets. "bucket": they always are.
            pad_to_multiple_of: divisor of the lengths that "longest" pads to, as far as the bucket
                has room. Default: 64 on a GPU where samples have one named dim, else 1.
            pad_to_longer: whether short samples may be padded to longer buckets than their own, in
                mode "auto", where that ends the step earlier (many small kernels, few samples a
                bucket). Only for models whose result padding does not change: causal ones with
                ignored labels, or with masks. Needs `pad`.
            packing: several sequences in one row, one after the other, so that short ones pad
                nothing: True where the model takes `position_ids`, which restart in each; the name
                of the input that gets the sequences' numbers (1, 2, ...) where it takes these. Both
                are made here: samples have the other inputs alone. Needs a model whose attention
                keeps sequences apart, and `weight`; see `runtime/data/packing.py`. "auto": by the
                input that the model has for it, each step where that is predicted to gain; where a
                model or loss cannot be packed it is as False, and the log says why.
            weight: quantity that the model's loss is a mean over: "samples", the name of the input
                with the labels (those not -100 count), `CountLabels`, or a function of a
                micro-batch's inputs.
            on_too_long: a sample longer than every bucket is an error, or is left out, counted in
                `skipped` and warned of.
            lookahead: steps planned and loaded ahead in a thread; 0: none, no thread.
            num_workers: processes of rank 0 that read a stream; 0: its thread does.
            plan_timeout_s: seconds that a rank waits for rank 0's plan; default: as for its peers.
            check_values: refuse samples with numbers that the model has no row of an embedding or
                no class for, and with NaN, when a step is made: in the loader's thread, so that no
                step waits for it. False: torch finds out, or the loss is NaN.
            loss_depends_on: quantities besides the sample that its loss may depend on, some of
                "micro_batch" (a loss that joins samples), "padding" and "row" (of `packing`). Any
                other dependence is an error, as loss and gradients would follow from the plan: the
                plain model is run on a few drawn samples to find it.

        Raises:
            DataError: an argument is wrong, the dataset is empty, the model would mix sequences
                that are packed, or the loss of a sample depends on more; on all ranks alike.
            PlanError: a bucket has no setting that fits.
        """
        check_compiled(compiled)
        check_pad(pad)
        most = check_step_size(tokens_per_step, samples_per_step)
        check_count("min_grad_accumulation_steps", min_grad_accumulation_steps, 1)
        check_count("lookahead", lookahead, 0)
        check_count("window", window, 0)
        check_count("seed", seed, 0)
        check_choice("got on_too_long=", on_too_long, ("error", "skip"), DataError)
        check_choice("got mode=", mode, MODES, DataError)
        check_choice("got pad_to=", pad_to, ("bucket", "longest"), DataError)
        if pad_to_multiple_of is not None:
            check_count("pad_to_multiple_of", pad_to_multiple_of, 1)
        streams = is_stream(dataset)
        check_reading(streams, shuffle, order, num_workers)
        shuffle = not streams if shuffle is None else shuffle
        check_flags(
            shuffle=shuffle, calculate_imbalance=calculate_imbalance, pad_to_longer=pad_to_longer,
            check_values=check_values,
        )  # fmt: skip
        if plan_timeout_s is not None:
            check_seconds("plan_timeout_s", plan_timeout_s)
        if pad_to_longer and (pad is None or mode not in FREE_MODES):
            raise DataError(
                f"pad_to_longer: got mode={mode!r} and pad={pad}; expected mode='auto' and a value "
                "to fill up each input with; give both, or leave it out"
            )
        allowed = replace(
            allowed_steps(mode, min_grad_accumulation_steps, max_grad_accumulation_steps),
            pads=pad_to_longer,
        )
        by_samples = samples_per_step is not None
        if by_samples and (allowed.least > 1 or allowed.most):
            raise DataError(
                f"samples_per_step={samples_per_step}: got bounds of the micro-batches of a step, "
                "by which it grows and shrinks; expected tokens_per_step with them; pass that, or "
                "leave the bounds out"
            )
        self.compiled = compiled
        self.on_too_long = on_too_long
        self.lookahead = lookahead
        self.calculate_imbalance = calculate_imbalance
        planner = compiled.batch_planner
        if planner is not None:
            check_stages(mode=mode not in FREE_MODES, pad_to_longer=pad_to_longer)
        arguments = weight, pad, check_values, pad_to_longer, loss_depends_on
        self._stream = SampleStream(dataset, num_workers, seed) if streams else None
        data: Any = self._stream or dataset
        self._maker = chosen_maker(
            compiled, packing, lambda packs: StepMaker(data, compiled, packs, *arguments)
        )
        packs, prices = self._maker.packs, None
        # Without a value to fill up with, a sample has its bucket's length, or is refused.
        fills = packs or self._maker.samples.fills_all
        own = compiled.own_lengths(pad_to_multiple_of) if pad_to == "longest" and fills else None
        if packs and planner is None:
            lengths = own or compiled.own_lengths(pad_to_multiple_of)
            prices = PackedPrices(lengths, to_bucket=own is None)
        self.recipe = Recipe(
            most, window, mode, allowed, packs, by_samples, planner, own, prices,
            chooses=packs and packing == AUTO,
        )  # fmt: skip
        self._epochs_alike = by_samples and mode != "intra" and on_too_long == "error"
        groups = compiled.groups
        self.plan_timeout_s = groups.timeout_s if plan_timeout_s is None else plan_timeout_s
        self._progress = Progress(
            None if streams else len(self._maker.samples), seed, shuffle, order
        )
        self._handing: Handing | None = None
        self._skipped: tuple[int, ...] = ()
        self._name = f"{groups.number('loader')}"
        self._iterations = 0
        self._stats = LoaderStats(padded_to="bucket" if own is None else "longest")
        self._told_padding = self._told_choice = False

    @property
    def tokens_per_step(self) -> int | None:
        """Most tokens of a global batch; None: it has a number of samples."""
        return None if self.recipe.by_samples else self.recipe.most

    @property
    def samples_per_step(self) -> int | None:
        """Samples of a global batch; None: it has a number of tokens."""
        return self.recipe.most if self.recipe.by_samples else None

    @property
    def table(self) -> PlanTable:
        """The rows that plans choose from, as the compiled model has them now."""
        groups, node_ranks = self.compiled.groups, self.compiled.node_ranks
        world, aligned = groups.world, groups.only_blocks
        found = mode_table(self.compiled, self.recipe.mode, world, node_ranks, aligned)
        speeds = self.compiled.speeds
        return replace(found, speeds=speeds) if speeds else found

    @property
    def epoch(self) -> int:
        """Number of the epoch that runs, or that comes next."""
        return self._progress.epoch

    @property
    def skipped(self) -> tuple[int, ...]:
        """Samples left out in this iteration (or the last) as longer than every bucket."""
        return self._skipped

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration that of `epoch`; the epoch it is in already goes on as it is."""
        check_count("epoch", epoch, 0)
        self._progress.go_to(epoch)

    def count_steps(self, epoch: int) -> int:
        """Returns how many steps a whole epoch has, without planning them.

        With `samples_per_step` this takes no time. With `tokens_per_step`, and in mode "intra", it
        needs the length of every sample: where the dataset has no `dims(i)`, each is loaded once.

        Raises:
            DataError: the micro-batches of a step are bounded, so that its size follows from plans;
                or the dataset is a stream, whose length nobody knows.
        """
        check_count("epoch", epoch, 0)
        if self._stream is not None:
            raise DataError(f"count_steps: {_UNCOUNTED}")
        recipe, samples = self.recipe, self._maker.samples
        if recipe.allowed.least > 1 or recipe.allowed.most:
            raise DataError(
                "count_steps: got bounds of the micro-batches of a step, by which it grows and "
                "shrinks; expected none; leave min_grad_accumulation_steps and "
                "max_grad_accumulation_steps out, or count steps as they come"
            )
        if self._epochs_alike:
            return len(self)
        return count_steps(self._progress.order(epoch), samples.fit, recipe, samples.forget)

    def __len__(self) -> int:
        """Returns the steps of each epoch; an error where epochs may have different numbers."""
        if self._stream is not None:
            raise NoLengthError(f"len(loader): {_UNCOUNTED}")
        if not self._epochs_alike:
            raise NoLengthError(
                "len(loader): got a loader whose epochs may differ in their number of steps, which "
                "follows from the samples' lengths and order; expected samples_per_step=, with "
                "which all are alike; call loader.count_steps(epoch) for the steps of one epoch"
            )
        return -(-len(self._maker.samples) // self.recipe.most)

    def __bool__(self) -> bool:
        return True  # also where there is no length

    def state_dict(self) -> State:
        """Returns where training is, the step yielded last counted as done; plain values.

        It says which samples are done and nothing of plans, so it goes on at any world size, in any
        mode. Of a stream it has the state that the dataset told for the samples before.
        """
        return self._progress.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration continue from a state, on any number of ranks.

        Raises:
            DataError: the state lacks a field or is of another dataset or order.
        """
        if self._stream is not None and isinstance(state, Mapping):
            self._stream.check_saved(state.get("source"))
        self._progress.load(state)

    def __iter__(self) -> Iterator[Step]:
        """Yields the steps of the epoch.

        Raises:
            DataError: a sample contradicts the specs or is longer than every bucket.
            PlanError: rank 0 sent no plan in time, or one of another plan table.
        """
        with bare, explaining("dcpc.DataLoader"):
            yield from self._epoch()

    def _epoch(self) -> Iterator[Step]:
        progress = self._progress
        progress.begin()
        self._skipped = ()
        self._iterations += 1
        fresh = progress.position == Position()
        relay = self._relay()
        stream, samples, rank = self._stream, self._maker.samples, self.compiled.groups.rank
        if stream is not None:
            self._handing = Handing(relay, stream, samples, rank, progress.epoch)
        used = 0

        made = self._made(relay)
        stop = None if relay is None else relay.stop
        look = self.compiled.groups.watch.look
        steps = ahead(made, self.lookahead, stop, look) if self.lookahead else made
        try:
            for cut, step in self._stats.timed(self._telling(steps)):
                used += 1
                progress.advance(cut.after, cut.last, cut.source)
                self._skipped += cut.skipped
                if step is not None:
                    progress.index = step.index + 1
                    self._log(step)
                    yield step
                    if step.problem is not None:
                        raise step.problem
            used += 1  # the message that there are no more
        finally:
            if relay is not None:
                relay.stop()
            steps.close()  # from here on no thread sends, or uses the dataset
            if stream is not None:
                stream.close()
            if relay is not None:
                relay.close(used)
        self._report_skipped(nothing_left=fresh and progress.index == 0)
        self._report_padding()
        progress.go_to(progress.epoch + 1)

    def stats(self) -> LoaderStats:
        """Returns the seconds of planning, and those that steps were waited for."""
        return self._stats

    def save_plan(self, step: Step, file: str | Path) -> None:
        """Writes a step's plan, with the table and the samples it was made from, as JSON.

        `dcpc replay FILE` prints it and plans it again.
        """
        check_step(step)
        path = path_of(file, PlanError, "save_plan")
        recipe, rows, to_bucket, own = self.recipe, step.rows, False, self.recipe.own
        alone = recipe.prices is None or (recipe.chooses and all(len(row) == 1 for row in rows))
        ids = {i: i for mb in step.plan.micro_batches for i in mb.sample_ids}
        if rows and alone:  # they were planned by their rows' numbers
            ids, rows = {number: row[0] for number, row in enumerate(rows)}, ()
        elif recipe.prices is not None:
            own, to_bucket = recipe.prices.own, recipe.prices.to_bucket
        fits = {i: self._maker.samples.fit(of) for i, of in sorted(ids.items())}
        samples = tuple((i, fit.bucket) for i, fit in fits.items() if fit.bucket)
        plan, lengths = step.plan.by_rows(step.rows), None
        if own is not None and not plan.pipelines:
            lengths = BatchLengths(own, {i: fit.dims for i, fit in fits.items()})
        found = PlanFile(plan, self.table, recipe.allowed, samples, lengths, rows, to_bucket)
        found.write(path)

    def _telling(self, steps: Iterator[T]) -> Iterator[T]:
        """Yields the steps; if they end with an error, tells the other ranks."""
        try:
            yield from steps
        except GeneratorExit:
            raise
        except BaseException as e:
            what = f"the loader, epoch {self._progress.epoch}"
            self.compiled.groups.watch.failed(e, what, ahead=True)
            raise

    def _relay(self) -> Relay | None:
        groups = self.compiled.groups
        if groups.control(groups.world) is None:
            return None
        return Relay(groups, f"{self._name}/{self._iterations}", self.plan_timeout_s)

    def _made(self, relay: Relay | None) -> Generator[tuple[PlannedBatch, Step | None], None, None]:
        """Yields this rank's steps: planned here, or by rank 0."""
        table, epoch = self.table, self._progress.epoch
        job = f"{self._progress.text()}, {self.recipe.text()}"
        if relay is None:
            cuts = self._cuts(table)
        elif self.compiled.groups.rank == 0:
            hand = self._handing
            cuts = relay.send(
                (cut.message(table, job), hand.give(cut) if hand else cut)
                for cut in self._cuts(table)
            )
        else:
            yield from self._received(relay, table, job)
            return
        for cut in cuts:
            yield cut, self._maker.step(epoch, cut, partial(self._again, cut))

    def _again(self, cut: PlannedBatch, plan: StepPlan) -> PlannedBatch:
        """Returns a batch whose plan's samples are planned again, by the table of the moment.

        Each rank makes it for itself, alike: it follows from the plan and the table.
        """
        table, recipe = self.table, self.recipe
        placed = {i: mb for mb in plan.micro_batches for i in mb.sample_ids}
        samples = [(i, mb.bucket) for i, mb in placed.items()]
        if recipe.own is not None:  # seconds at other lengths are rank 0's alone to predict
            recipe = replace(recipe, own=replace(recipe.own, seconds_at=None))
        found = recipe.plan(samples, table, lambda i: placed[i].shape.shape_key)
        again = replace(cut, plan=found, table=table)
        return again if self._handing is None else self._handing.repeat(again)

    def _received(
        self, relay: Relay, table: PlanTable, job: str
    ) -> Iterator[tuple[PlannedBatch, Step | None]]:
        """Yields this rank's steps of rank 0's plans."""
        progress, world, hand = self._progress, self.compiled.groups.world, self._handing
        for message in relay.receive():
            try:
                # Rank 0's table may have changed meanwhile: its messages say how.
                cut = PlannedBatch.of(message, table, job)
                cut = cut if hand is None else hand.take(cut)
            except DcpcError as error:
                # The others go on to the step, and wait for this rank: they learn of it there.
                nothing = PlannedBatch(progress.index, None, 0, (), progress.position, 0.0, table)
                plan = step_plan((), world)
                yield (
                    nothing,
                    Step(progress.epoch, progress.index, plan, (), 0.0, 0, 0, 0.0, problem=error),
                )
                return
            yield cut, self._maker.step(progress.epoch, cut, partial(self._again, cut))

    def _cuts(self, table: PlanTable) -> Iterator[PlannedBatch]:
        """Yields the rest of the epoch's batches, planned here with the table of each moment."""
        progress, fit, stream = self._progress, self._maker.samples.fit, self._stream
        position = progress.position
        if stream is not None:
            stream.begin(progress.epoch, position, progress.source)
        order = progress.order() if stream is None else StreamOrder(stream)
        now = _TableNow(self, table)
        groups = self.compiled.groups
        # Not where each rank plans by itself: the clocks of ranks differ.
        one = groups.world == 1 or groups.control(groups.world) is not None
        evolves = one and self.recipe.mode == "evolve" and self.lookahead > 0
        for cut in cut_epoch(order, fit, now, self.recipe, position, progress.index, evolves):
            if cut.skipped and self.on_too_long == "error":
                self._refuse(cut.skipped[0])
            self._tell_choice(cut)
            yield cut if self._handing is None else self._handing.filled(cut)

    def _tell_choice(self, cut: PlannedBatch) -> None:
        """Logs once that a step was not packed, by choice."""
        alone = len(cut.rows) > 1 and all(len(row) == 1 for row in cut.rows)
        if self.recipe.chooses and alone and not self._told_choice:
            self._told_choice = True
            LOG.info(
                "packing='auto': step %d has one sample a row, as packing is not predicted to gain "
                "%.0f%%; others are chosen each by itself", cut.index, 100 * PACKING_GAIN,
            )  # fmt: skip

    def _log(self, step: Step) -> None:
        if self.calculate_imbalance and self.compiled.groups.rank == 0:
            plan = step.plan
            LOG.info(
                "step %d of epoch %d: %d samples, %d tokens; predicted %.3g s, imbalance %.1f%%, "
                "gap to the lower bound %.1f%%; planned in %.3f s; %s",
                *(step.index, step.epoch, step.samples, step.tokens, plan.makespan_s),
                *(100 * plan.imbalance, 100 * plan.gap, step.plan_s, plan.binds),
            )

    def _report_skipped(self, nothing_left: bool) -> None:
        if not self._skipped:
            return
        samples = self._maker.samples
        total = f" of {len(samples)}" if self._stream is None else ""
        n, some = len(self._skipped), ", ".join(map(str, self._skipped[:8]))
        text = (
            f"epoch {self._progress.epoch}: got {n}{total} samples longer than every "
            f"bucket ({some}{', ...' if n > 8 else ''}); expected at most "
            f"{samples.describe_largest()}; add a larger bucket or cut them"
        )
        if nothing_left:
            raise DataError(text)
        warnings.warn(f"{text}: left out", stacklevel=3)

    def _report_padding(self) -> None:
        """Logs once, after an epoch, the cost of padding and buckets that would leave less."""
        knows = self.compiled.groups.rank == 0 and not self.recipe.packs
        if knows and not self._told_padding:
            self._told_padding = True
            buckets, counts = self.table.buckets, self._maker.samples.counts()
            own = self.recipe.own
            advice = padding_advice(self._stats.padding_share, buckets, counts, own)
            if advice:
                LOG.warning("epoch %d: %s", self._progress.epoch, advice)

    def _refuse(self, index: int) -> NoReturn:
        samples = self._maker.samples
        dims = ", ".join(f"{name}: {n}" for name, n in samples.fit(index).dims)
        raise DataError(
            f"sample {index}: got {{{dims}}}, longer than every bucket; expected at most "
            f"{samples.describe_largest()}; add a larger bucket, cut the sample, or pass "
            "on_too_long='skip'"
        )


class _TableNow:
    """The table of a loader as its compiled model has it at each call."""

    def __init__(self, loader: DataLoader, table: PlanTable) -> None:
        self._loader, self._table = loader, table
        self._made_of = self._key()

    def __call__(self) -> PlanTable:
        # First what it follows from: the model's own thread may change that meanwhile.
        key = self._key()
        if key != self._made_of:
            self._table, self._made_of = self._loader.table, key
        return self._table

    def _key(self) -> tuple[int, tuple[float, ...]]:
        compiled = self._loader.compiled
        return compiled.replans, compiled.speeds
