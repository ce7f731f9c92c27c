"""From inputs to the variant of their shape, and from that to a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from dcpc.buckets import BATCH, Bucket, Buckets, shapes_and_dtypes
from dcpc.codegen import ROWS_GROUP, Variant, bind_group, fetched, take_part
from dcpc.codegen.lower.output_pieces import OutputPiece, output_place
from dcpc.compiled.lengths import TraceLengths
from dcpc.compiled.memory.staying import StayingUnits
from dcpc.compiled.seeds import Seeds
from dcpc.compiled.unpadding.sides import CallSetting
from dcpc.compiled.unpadding.unpadding import Unpadding
from dcpc.errors import DispatchError, meant
from dcpc.fx.torch_api.functions import within_transform
from dcpc.ir import Placement
from dcpc.passes.value_ranges import value_ranges
from dcpc.plan.planning import Planned
from dcpc.plan.traced import group_name
from dcpc.runtime.averages import RunningAverages
from dcpc.runtime.data.steps import MicroBatch, Step
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.parameters.gathered import GatheredStore
from dcpc.runtime.parameters.store import ParameterStore
from dcpc.runtime.planner.plans import PlannedMicroBatch, RowSetting
from dcpc.runtime.step.stats import Stats
from dcpc.runtime.values import out_of_range
from dcpc.trace import autocast_dtype, casting
from dcpc.trace.loss import by_position

# A bucket, ranks of the group, and samples of a row of the plan table.
SettingKey = tuple[Bucket, int, int]
_VariantKey = tuple[
    Bucket, int, tuple[tuple[str, int], ...], RowSetting, int, frozenset[int] | None
]


class Dispatch:
    """Runs calls and micro-batches, each by the variant of its shape; compiles missing ones.

    Attributes:
        store: store of the parameters.
        stats: counts of calls and steps so far.
        value_ranges: ranges of values that ops need of integer inputs, by bucket and input.
        lengths: lengths at which the graphs of the buckets are right.
        variants: variant of some lengths of a bucket, the program that it runs, a setting, a place
            in the group and a way to gather parameters, with its integers; filled on first use.
        menu_steps: steps of recompute that take the place of those in a step's plan.
    """

    def __init__(
        self,
        buckets: Buckets,
        planned: Planned,
        groups: Groups,
        seeds: Seeds,
        store: ParameterStore,
        averages: RunningAverages,
        unpad: bool | str = False,
    ) -> None:
        """Binds the aligned blocks of ranks.

        Args:
            buckets: buckets that inputs are matched with.
            planned: plans and graphs of each bucket.
            groups: the process groups.
            seeds: seeds of all random numbers.
            store: store of the parameters.
            averages: running statistics that micro-batches change.
            unpad: which calls run without padding, as for `Unpadding`.
        """
        self.store = store
        self.stats = Stats()
        self.variants: dict[_VariantKey, tuple[Variant, tuple[int, ...]]] = {}
        # Bucket of a micro-batch, or None; name, shape and dtype of each input -> lengths.
        self._matched: dict[tuple[Any, ...], tuple[Bucket, Mapping[str, int]]] = {}
        self.menu_steps: dict[SettingKey, int] = {}
        # The units that this round gathers again in backward.
        self._gathering: frozenset[int] | None = None
        self._staying: StayingUnits | None = None
        self._again: dict[tuple[Bucket, RowSetting], frozenset[int]] = {}
        self._unpad = unpad
        self._unpadding: dict[int, Unpadding] = {}
        self._buckets = buckets
        self._planned = planned
        self._groups = groups
        self._seeds = seeds
        self._averages = averages
        ranges = {id(v): value_ranges(v.traced.program) for v in planned.traces}
        self.value_ranges = {b: ranges[id(v)] for b, v in planned.by_bucket.items()}
        self.lengths = TraceLengths(planned)
        self._refuse_different_sums()
        self.bind_blocks()

    def bind_blocks(self) -> None:
        """Lets calls outside of a train step find the aligned blocks of ranks."""
        for sp in self._planned.request.sps:
            if sp in self._groups.degrees:
                self._groups.of(sp)
        for sp, made in self._groups.made.items():
            bind_group(group_name(sp), made)
        if self.store.in_rounds:
            pg = self._groups.of(self.store.block)
            if pg is not None:
                bind_group(ROWS_GROUP, pg)

    def _refuse_different_sums(self) -> None:
        """Refuses traces that sum gradients of different parameters, where they meet in rounds.

        Raises:
            DispatchError: some do.
        """
        if not self.store.in_rounds or len(self._planned.traces) == 1:
            return
        found = set()
        for runnable in self._planned.traces:
            bucket = next(b for b, r in self._planned.by_bucket.items() if r is runnable)
            joint = runnable.traced.lowering(self._planned.placement(bucket)).joint
            names = runnable.traced.program.parameters
            found.add(tuple(tuple(names[n] for n in u.summed) for u in joint.gathers))
        if len(found) > 1:
            raise DispatchError(
                f"parameters='rounds': got {len(self._planned.traces)} traces of the model, which "
                "have gradients of different parameters; expected the same ones: ranks of one "
                "round sum them together; declare buckets in which no dim is 0 or 1 in some of "
                "them only, or take parameters='step'"
            )

    # ----------------------------------------------------------------------- inputs and buckets

    def named(
        self, model: nn.Module, args: tuple[Tensor, ...], inputs: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Returns all inputs by name; lacking ones that may be empty are empty tensors.

        Args:
            model: model of the user.
            args: inputs given by position, in the order of the buckets' specs.
            inputs: inputs given by name.

        Raises:
            DispatchError: too many, one twice, or forward has them in another order.
        """
        names = tuple(self._buckets.inputs)
        if len(args) > len(names):
            raise DispatchError(
                f"got {len(args)} positional inputs; expected at most {len(names)} "
                f"({', '.join(names)}); pass inputs by name"
            )
        wanted = by_position(model, names) if args else []
        if names[: len(args)] != tuple(wanted[: len(args)]):
            raise DispatchError(
                f"got {len(args)} positional inputs in the buckets' order ({', '.join(names)}); "
                f"expected forward's order ({', '.join(wanted)}) to be the same, as one of the two "
                "would be passed for another; pass inputs by name"
            )
        twice = [n for n in names[: len(args)] if n in inputs]
        if twice:
            raise DispatchError(
                f"got input {twice[0]} twice; expected it once; pass it by name only"
            )
        return self._buckets.completed({**dict(zip(names, args, strict=False)), **inputs})

    def match(self, inputs: Mapping[str, Tensor]) -> tuple[Bucket, Mapping[str, int]]:
        """Returns the smallest bucket that holds and runs some inputs, and the length of every dim.

        Among the lengths is that of the batch.

        Raises:
            DispatchError: names, dtypes or shapes match no bucket, its graphs are not for these
                lengths, or an input requires a gradient; or it is a call within `torch.func`.
        """
        self._check(inputs)
        key = None, *((n, x.shape, x.dtype) for n, x in inputs.items())
        if key not in self._matched:
            found = self._buckets.match(*shapes_and_dtypes(inputs), self.lengths.runs_at)
            bucket, sizes = found
            own = {n: size for n, size in sizes.items() if n != BATCH}
            self.lengths.refuse(bucket, own, "call")
            self.lengths.refuse_compiled_anew(bucket, own)
            self._matched[key] = found
        return self._matched[key]

    def _check(self, inputs: Mapping[str, Tensor]) -> None:
        """Refuses inputs that are no tensors or require a gradient, and calls in `torch.func`."""
        if within_transform():
            raise DispatchError(
                "got a call within torch.func (vmap, grad, jvp); expected one outside: compiled "
                "graphs are for whole tensors, and their backward has no derivative; transform the "
                "plain model (compiled.module), or call .backward() of the loss"
            )
        for name, value in inputs.items():
            if not isinstance(value, Tensor):
                named, known = isinstance(value, Mapping), ", ".join(self._buckets.inputs)
                raise DispatchError(
                    f"input {name}: got {type(value).__name__}; expected tensors named {known}; "
                    + ("pass its entries by name: compiled(**batch)" if named else
                       "wrap it in torch.tensor" if name in self._buckets.inputs else
                       meant(name, self._buckets.inputs, "leave it out"))
                )  # fmt: skip
            spec = self._buckets.inputs.get(name)
            learns = spec is not None and spec.learns
            if value.requires_grad and torch.is_grad_enabled() and not learns:
                raise DispatchError(
                    f"input {name}: got a tensor that requires grad; expected one that does not: "
                    "gradients are made for the model's parameters alone; detach it, or declare it "
                    f"as one that learns: {name}: '{spec or 'float32[...]'} requires_grad'"
                )

    def _sizes_of(self, mb: MicroBatch, inputs: Mapping[str, Tensor]) -> Mapping[str, int]:
        """Returns the length of every dim of a micro-batch: its bucket's, or shorter.

        Raises:
            DispatchError: the bucket's graphs are not for these lengths, or it is none of these
                buckets.
        """
        if mb.bucket not in self._planned.by_bucket:
            raise DispatchError(
                f"a micro-batch of {mb.bucket}: got a step of other buckets; expected one of "
                f"{', '.join(map(str, self._planned.by_bucket))}; take steps of a loader of this "
                "compiled model"
            )
        self._check(inputs)
        key = mb.bucket, *((n, x.shape, x.dtype) for n, x in inputs.items())
        if key not in self._matched:
            sizes = self._buckets.lengths(*shapes_and_dtypes(inputs))
            own = {n: size for n, size in sizes.items() if n != BATCH}
            if own == dict(mb.bucket.shape_key):
                sizes = dict(self.match(inputs)[1])
            self.lengths.refuse(mb.bucket, own, "micro-batch")
            self._matched[key] = mb.bucket, sizes
        return self._matched[key][1]

    def input_problem(self, bucket: Bucket, inputs: Mapping[str, Tensor]) -> DispatchError | None:
        """Returns the error of inputs on another device or of values out of range; None: none.

        Values are looked at on the CPU alone.

        Args:
            bucket: bucket of these inputs.
            inputs: tensors by input name.
        """
        here = self._groups.device
        for name, value in inputs.items():
            if value.layout != torch.strided or value.device.type != here.type:
                return DispatchError(
                    f"input {name}: got a {value.layout} tensor on {value.device}; expected a "
                    f"dense one on {here}, where the model is; move it by .to('{here}'), or make "
                    "it dense by .to_dense()"
                )
        wrong = out_of_range(inputs, self.value_ranges[bucket])
        return None if wrong is None else DispatchError(str(wrong))

    def setting(self, bucket: Bucket) -> RowSetting:
        """Returns the planned setting of a bucket."""
        plan = self._planned.plans[bucket]
        return RowSetting(plan.sp, plan.micro_batch, plan.menu_step)

    def placement(self, bucket: Bucket, sizes: Mapping[str, int], setting: RowSetting) -> Placement:
        """Returns a setting's placement; another where it would leave ranks without samples."""
        runnable = self._planned.by_bucket[bucket]
        full = {**bucket.sizes, BATCH: setting.micro_batch}
        planned = runnable.priced.placement(full, setting.sp)
        if runnable.sharded_batch_is_idle(planned, sizes):
            return runnable.priced.placement(sizes, setting.sp)
        return planned

    # ------------------------------------------------------------------------- calls and rounds

    def run_call(
        self,
        bucket: Bucket,
        sizes: Mapping[str, int],
        inputs: Mapping[str, Tensor],
        setting: RowSetting,
    ) -> tuple[Any, ...]:
        """Returns the outputs of a call by hand, the loss first, by its bucket's setting."""
        place = self._groups.rank % setting.sp
        return self._run(bucket, sizes, inputs, setting, place)

    def prepare(self, mb: MicroBatch) -> None:
        """Compiles the variant of a micro-batch."""
        sizes = self._sizes_of(mb, mb.inputs)
        self._variant(mb.bucket, sizes, self.setting_of(mb), mb.ranks.index(self._groups.rank))

    def begin_step(self, rounds: Sequence[Sequence[PlannedMicroBatch]]) -> None:
        """Begins a step, over which units of parameters that are away stay where there is room."""
        away = self._planned.request.held_away and self._planned.traces[0].traced.backend == "eager"
        if away and self._staying is None:
            self._staying = StayingUnits(self._planned, self.setting_of, self._gathers_again)
        if self._staying is not None:
            fetched.resident = self._staying.over(rounds, self.store)

    def end_step(self) -> None:
        """Ends a step: nothing is gathered again, and no unit stays."""
        self._gathering = fetched.resident = None

    def begin(self, together: Sequence[PlannedMicroBatch]) -> None:
        """Begins a round, in which all gather again the units that any of its micro-batches does.

        Args:
            together: micro-batches that ranks of a block run at once; none: there is no round.
        """
        again = [self._gathers_again(mb) for mb in together]
        for mb in together:
            traced, store = self._planned.by_bucket[mb.bucket].traced, self.store
            assert isinstance(store, GatheredStore), "it goes in rounds"
            lent = () if traced.units is None else traced.units.lent
            held = traced.tensors()
            store.lend({id(store.taken(held[name])) for name in lent})
        self._gathering = frozenset().union(*again) if again else None

    def _gathers_again(self, mb: PlannedMicroBatch) -> frozenset[int]:
        setting = self.setting_of(mb)
        if (mb.bucket, setting) not in self._again:
            sizes = {**mb.bucket.sizes, BATCH: setting.micro_batch}
            priced = self._planned.by_bucket[mb.bucket].priced
            placement = self.placement(mb.bucket, sizes, setting)
            self._again[mb.bucket, setting] = priced.gathered_again(placement, setting.menu_step)
        return self._again[mb.bucket, setting]

    def run_micro_batch(
        self, step: Step, mb: MicroBatch, inputs: Mapping[str, Tensor]
    ) -> tuple[Any, ...]:
        """Returns the outputs of a micro-batch of a step, the loss first.

        Args:
            step: step of the micro-batch; random numbers follow from its place there.
            mb: micro-batch with its setting and its ranks.
            inputs: inputs of the micro-batch, on the device.
        """
        bucket, sizes = mb.bucket, self._sizes_of(mb, inputs)
        pg = self._groups.over(mb.ranks)
        if pg is not None:
            # Backward follows before the next micro-batch binds the name to its own group.
            bind_group(group_name(mb.sp), pg)
        seed = self._seeds.of_micro_batch(step.epoch, step.index, mb.number)
        place = mb.ranks.index(self._groups.rank)
        return self._run(bucket, sizes, inputs, self.setting_of(mb), place, seed)

    def idle(self, deliver: Callable[[nn.Parameter, Tensor], None]) -> None:
        """Takes part in a round in which this rank has nothing to run; see `InRounds.idle`."""
        runnable = self._planned.traces[0]
        bucket = next(b for b, r in self._planned.by_bucket.items() if r is runnable)
        joint = runnable.traced.lowering(self._planned.placement(bucket)).joint
        tensors = {n: self.store.taken(t) for n, t in runnable.traced.tensors().items()}
        assert joint.units is not None, "only where graphs gather there are rounds"
        again = self._gathering or frozenset()
        for name, rows in take_part(joint.units, joint.gathers, tensors, again):
            parameter = tensors[name]
            assert isinstance(parameter, nn.Parameter), f"{name} has a gradient"
            deliver(parameter, rows)

    def own_casts(self) -> AbstractContextManager[object]:
        """Returns a context without autocast: the captured graph has the casts.

        Raises:
            DispatchError: another autocast than the captured one is around the call.
        """
        kind = self._groups.device.type
        around, captured = autocast_dtype(kind), self._planned.autocast
        if around is not None and around != captured:
            raise DispatchError(
                f"got a call under torch.autocast('{kind}', {around}); expected "
                f"{captured or 'none'}, which the model was captured under; compile it with "
                f"autocast={around}"
            )
        return casting(kind, None)

    def _run(
        self,
        bucket: Bucket,
        sizes: Mapping[str, int],
        inputs: Mapping[str, Tensor],
        setting: RowSetting,
        place: int,
        seed: int | None = None,
    ) -> tuple[Any, ...]:
        """Returns the loss, then other outputs.

        Without a seed torch's generator gives that of a call by hand.
        """
        traced = self._planned.by_bucket[bucket].traced
        # The graph was traced for dense inputs; a slice or an expanded tensor has other strides.
        given = {p: inputs[n].contiguous() for p, n in traced.program.inputs.items()}
        variant, integers = self._without_padding(
            bucket, sizes, setting, place, given
        ) or self._variant(bucket, sizes, setting, place)
        own = traced.tensors()
        if self.store.in_rounds:
            own = {name: self.store.taken(t) for name, t in own.items()}
        named = {**own, **given}
        self.stats.called(bucket, sizes.get(BATCH, 1))
        if seed is None:
            seed = self._seeds.of_call(variant.sp) if variant.draws else 0
        found = variant.outputs([named[p] for p in variant.placeholders], integers, seed)
        program = traced.program
        if program.statistics:
            held, new = traced.tensors(), found[len(program.results) :]
            own_samples = sizes.get(BATCH, 1) / setting.sp
            self._averages.take([held[p] for p in program.statistics], new, own_samples)
        results = found[1 : len(program.results)]
        return (found[0], *self._pieces(bucket, sizes, setting, place, results))

    def _pieces(
        self,
        bucket: Bucket,
        sizes: Mapping[str, int],
        setting: RowSetting,
        place: int,
        outputs: Sequence[Tensor],
    ) -> Iterator[Tensor | OutputPiece]:
        """Yields the outputs besides the loss; pieces with the place where they lie."""
        program = self._planned.by_bucket[bucket].traced.program
        if not program.pieces:
            yield from outputs
            return
        placement = self.placement(bucket, sizes, setting)
        dims = program.dims(sizes)
        for name, x in zip(program.results[1:], outputs, strict=True):
            at = output_place(program, placement, name, dims, place)
            if at is None:
                yield OutputPiece(x)
            else:
                yield OutputPiece(x, at.dim, at.positions.to(x.device), at.length)

    def _without_padding(
        self,
        bucket: Bucket,
        sizes: Mapping[str, int],
        setting: RowSetting,
        place: int,
        given: dict[str, Tensor],
    ) -> tuple[Variant, tuple[int, ...]] | None:
        """Returns the variant of a call's valid rows, and its integers; None: it runs padded.

        Adds the indices of valid rows to `given`, the inputs by placeholder.
        """
        unpadding = self.unpadding(bucket)
        pieces = self._planned.by_bucket[bucket].traced.program.pieces
        if unpadding is None or (pieces and setting.sp > 1):
            return None
        planned = {**bucket.sizes, BATCH: setting.micro_batch}
        how = CallSetting(setting.sp, setting.menu_step, place, planned, self._gathering)
        rows = unpadding.rows(sizes, given, how)
        found = rows and unpadding.variant(sizes, rows, how)
        if not rows or not found:
            return None
        unpadding.compare(sizes, given, rows, how)
        given.update(unpadding.given(rows))
        self.stats.unpadded += 1
        return found

    def unpadding_line(self) -> str:
        """Returns the report's line on calls without padding; "" where none are asked for."""
        found = [self.unpadding(b) for b in self._planned.plans]
        reasons = dict.fromkeys(made.reason for made in found if made is not None)
        if not reasons:
            return ""
        if all(reasons):
            return f"padding: every call runs with it: {'; '.join(reasons)}\n"
        return (
            "padding: calls run without it where that changes nothing"
            + (" and pays" if self._unpad == "auto" else "")
            + ", in no more memory than is predicted above\n"
        )

    def unpadding(self, bucket: Bucket) -> Unpadding | None:
        """Returns the runner of a bucket's calls without padding; None: it is not asked for."""
        if not self._unpad:
            return None
        runnable = self._planned.by_bucket[bucket]
        if id(runnable) not in self._unpadding:
            self._unpadding[id(runnable)] = Unpadding(runnable, self._unpad)
        return self._unpadding[id(runnable)]

    def _variant(
        self, bucket: Bucket, sizes: Mapping[str, int], setting: RowSetting, place: int
    ) -> tuple[Variant, tuple[int, ...]]:
        """Returns the variant of sizes and a setting, compiled on first use, and its integers."""
        again = self._gathering
        runnable = self._planned.by_bucket[bucket]
        key = (bucket, id(runnable), tuple(sorted(sizes.items())), setting, place, again)
        if key not in self.variants:
            placement = self.placement(bucket, sizes, setting)
            step = setting.menu_step
            self.variants[key] = runnable.variant(placement, step, sizes, place, again)
        return self.variants[key]

    def setting_of(self, mb: MicroBatch | PlannedMicroBatch) -> RowSetting:
        """Returns a micro-batch's setting: as planned, but for steps of recompute chosen since."""
        planned = self.menu_steps.get((mb.bucket, mb.sp, mb.micro_batch), mb.menu_step)
        return RowSetting(mb.sp, mb.micro_batch, planned)
