"""One compiled model in several modes, and at lengths besides its buckets: an edition for each.

    train()                    what `dcpc.compile` has traced and planned
    eval()                     made when it is first called: where its graphs are the same, those of
                               the first; else traced, planned and compared as that was
    with all outputs           made when they are first asked for: forward returns them, too
    a length between buckets   made when it is first asked for; with the graphs of its mode where a
                               trace with this length among the buckets is the same

An edition keeps each bucket's degree, so ranks of one group meet whatever mode each is in, and find
out before anything is sent. Nothing is sent to make one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import Tensor, nn

from dcpc.buckets import BATCH, Bucket, Buckets
from dcpc.compiled.dispatch import Dispatch
from dcpc.compiled.outputs.wanted import SHARDED, WithOutputs
from dcpc.errors import DcpcError, DispatchError
from dcpc.ir import Program
from dcpc.plan.following import Followed, stands_for
from dcpc.plan.planning import Planned, plan_with_degrees
from dcpc.plan.runnable import Runnable
from dcpc.plan.tiling import TileLadder
from dcpc.runtime.groups.same_state import checksum
from dcpc.trace import casting, trace
from dcpc.trace.loss import Loss
from dcpc.verify import Verifier

# What is made of traces: (buckets, a program for those of them that share a trace) -> what runs.
# And the `loss=` of what is traced anew.
Prepare = Callable[[Buckets, Sequence[Program], Loss | None], Mapping[Bucket, Runnable]]
MakeDispatch = Callable[[Buckets, Planned], Dispatch]


@dataclass(frozen=True, slots=True)
class ModuleModes:
    """The modules of a model that are in train(), and those in eval().

    Attributes:
        training: whether the model itself is in train().
        others: names of the modules that are not as it is.
    """

    training: bool
    others: frozenset[str]

    @classmethod
    def of(cls, model: nn.Module) -> ModuleModes:
        """Returns the modes of a model's modules now."""
        every = model.named_modules()
        return cls(model.training, frozenset(n for n, m in every if m.training != model.training))

    def __str__(self) -> str:
        name = "train()" if self.training else "eval()"
        if not self.others:
            return name
        shown = ", ".join(sorted(self.others)[:4]) + ", ..." * (len(self.others) > 4)
        return f"{name} but for {shown}"


@contextmanager
def in_modes(model: nn.Module, modes: ModuleModes) -> Iterator[None]:
    """Has a model's modules in these modes in its block."""
    before = [(m, m.training) for m in model.modules()]
    try:
        for name, module in model.named_modules():
            module.training = modes.training != (name in modes.others)
        yield
    finally:
        for module, training in before:
            module.training = training


@dataclass(frozen=True, slots=True)
class Edition:
    """The traces, plans and graphs of a model in one mode, at the buckets or another length.

    Attributes:
        modes: modes of the model's modules.
        buckets: buckets that it is for.
        planned: traces and plans of these buckets.
        followed: state of the model that the traces are of.
        verifier: verifier that compares the graphs with the model.
        dispatch: dispatch that runs calls; editions of the same graphs share one.
        text: text that is the same on ranks that run the same graphs.
    """

    modes: ModuleModes
    buckets: Buckets
    planned: Planned
    followed: Followed
    verifier: Verifier
    dispatch: Dispatch
    text: str

    @classmethod
    def of(
        cls,
        model: nn.Module,
        buckets: Buckets,
        planned: Planned,
        verifier: Verifier,
        dispatch: Dispatch,
    ) -> Edition:
        """Returns the edition of a model as it is now."""
        modes = ModuleModes.of(model)
        hashes = " ".join(v.traced.program.graph_hash for v in planned.traces)
        text = f"graphs {hashes} of {modes}"
        if isinstance(planned.loss, WithOutputs):
            text += f", outputs {planned.loss.kind}"
        followed = Followed(model, buckets, planned)
        return cls(modes, buckets, planned, followed, verifier, dispatch, text)

    def call_text(
        self, number: int, bucket: Bucket, sizes: Mapping[str, int], inputs: Mapping[str, Tensor]
    ) -> list[str]:
        """Returns texts that ranks of a group must have alike for their call of this number."""
        own = Bucket.of({n: size for n, size in sizes.items() if n != BATCH})
        at = bucket if own.dims == bucket.shape_key else f"{own}, within {bucket},"
        what = [f"{at} with batch {sizes.get(BATCH, 1)}, call {number}", self.text]
        what += [str(self.planned.plans.get(bucket))]  # a model in stages may have none
        # Floats may differ in their last bits, as where each rank ran an encoder before.
        whole = [(n, x) for n, x in sorted(inputs.items()) if not x.is_floating_point()]
        return what + [f"checksum of input '{n}' {checksum(x)}" for n, x in whole]

    def __str__(self) -> str:
        sizes = ", ".join(map(str, self.buckets)) if len(self.buckets) == 1 else "all buckets"
        return f"in {self.modes}, {sizes}"


class EditionCache:
    """All editions of a compiled model; makes those that are missing.

    Args:
        model: model of the user.
        first: edition that `dcpc.compile` made.
        prepare: function that makes runnables of programs, as `dcpc.compile` did.
        make_dispatch: function that makes the dispatch of an edition.
        device_type: kind of device that the model is on.

    Attributes:
        first: edition that `dcpc.compile` made.
        partly: whether buckets may fit on no rank alone, as of a model in stages.
    """

    def __init__(
        self,
        model: nn.Module,
        first: Edition,
        prepare: Prepare,
        make_dispatch: MakeDispatch,
        device_type: str,
    ) -> None:
        self.first, self.partly = first, False
        self._device_type = device_type
        self._model = model
        self._prepare, self._make_dispatch = prepare, make_dispatch
        self._by_modes = {first.modes: first}
        self._with_outputs: dict[tuple[ModuleModes, str], Edition] = {}
        self._by_length: dict[tuple[str, Bucket], Edition] = {}
        self._last = first
        self._alike = {first.modes: True}

    def now(self) -> tuple[Edition, DcpcError | None]:
        """Returns the edition of the model as it is, and its problem; None: it can run.

        Not raised here: ranks that are about to do something together have to tell each other.
        """
        if self._last.followed.holds(self._model):
            return self._last, self._postponed()
        modes = ModuleModes.of(self._model)
        found = self._by_modes.get(modes)
        try:
            self._last = found or self._made(modes)
        except DcpcError as error:
            return self.first, error
        problem = self._last.followed.problem(self._model, again=True)
        return self._last, problem or self._postponed()

    def alike(self) -> bool:
        """Whether the model as it is has the graphs of the first edition; it is captured for it.

        Raises:
            DcpcError: it cannot be captured, or something else of it changed.
        """
        modes = ModuleModes.of(self._model)
        if modes not in self._alike:
            with in_modes(self._model, self.first.modes):
                problem = self.first.followed.problem(self._model)
            if problem is not None:
                raise problem
            first = self.first.planned
            self._alike[modes] = self._are_first(self._captured(self.first.buckets, first.loss))
        return self._alike[modes]

    def _are_first(self, programs: Sequence[Program]) -> bool:
        pairs = zip(self.first.planned.captured(self.first.buckets), programs, strict=True)
        return all(stands_for(before, program) for before, program in pairs)

    def _postponed(self) -> DcpcError | None:
        if self.first.verifier.postponed_s is None:
            return None
        with in_modes(self._model, self.first.modes):
            return self.first.verifier.postponed_problem()

    def _made(self, modes: ModuleModes) -> Edition:
        """Makes the edition of other modes, keeps it, and returns it."""
        model, first = self._model, self.first
        with in_modes(model, first.modes):  # what else changed is followed, or refused
            problem = first.followed.problem(model)
        if problem is not None:
            raise problem
        start_s = time.perf_counter()
        planned = first.planned
        programs = self._captured(first.buckets, planned.loss)
        if self._are_first(programs):
            made = replace(first, modes=modes, followed=Followed(model, first.buckets, planned))
        else:
            by_bucket = self._prepare(first.buckets, programs, planned.loss)
            degrees = _degrees(planned)
            made = self._planned(first.buckets, by_bucket, degrees, start_s, planned.loss)
        self._by_modes[modes] = made
        return made

    def with_outputs(self, base: Edition, kind: str) -> tuple[Edition, DcpcError | None]:
        """Returns the edition whose graphs return forward's outputs, and its problem or None.

        Not raised here, as in `now`.

        Args:
            base: edition of the model's modes.
            kind: kind of the outputs, "gathered" or "sharded".
        """
        found = self._with_outputs.get((base.modes, kind))
        if found is not None and found.followed.holds(self._model):
            return found, None
        start_s = time.perf_counter()
        loss = WithOutputs(self._model, base.planned.loss, kind)
        try:
            programs = self._captured(base.buckets, loss)
            by_bucket = self._prepare(base.buckets, programs, loss)
            degrees = _degrees(base.planned)
            found = self._planned(base.buckets, by_bucket, degrees, start_s, loss)
        except DcpcError as error:  # TraceError: forward returns more than tensors and numbers
            return base, error
        self._with_outputs[base.modes, kind] = found
        return found, None

    def at(self, base: Edition, sizes: Mapping[str, int], larger: Bucket) -> Edition:
        """Returns the edition of another length, at the degree of a bucket that holds it.

        Args:
            base: edition of the model's modes.
            sizes: length of every dim.
            larger: bucket that holds this length.

        Raises:
            TraceError: forward does something else at this length than at the buckets.
            DispatchError: ranks gather parameters from each other, and the graphs are others.
        """
        lengths = {n: s for n, s in sizes.items() if n != BATCH}
        own = Bucket.of(lengths if larger.batch is None else {**lengths, BATCH: larger.batch})
        key = (base.text, own)
        found = self._by_length.get(key)
        if found is None or not found.followed.holds(self._model):
            self._by_length[key] = found = self._at(base, own, larger)
        return found

    def _at(self, base: Edition, own: Bucket, larger: Bucket) -> Edition:
        start_s = time.perf_counter()
        planned = base.planned
        fixed = base.buckets.fixed
        only = base.buckets.like([own.sizes])
        alike = [b for b in base.buckets if fixed(b.sizes) == fixed(own.sizes)]
        degrees = {own: _degrees(planned)[larger]}
        if alike:
            every = base.buckets.like([*(b.sizes for b in alike), own.sizes])
            runnable = planned.by_bucket[alike[0]]
            (program,) = self._captured(every, planned.loss)
            if stands_for(runnable.traced.program, program):
                runs = {own: runnable}
                return self._planned(only, runs, degrees, start_s, planned.loss, base)
        if planned.block:
            raise DispatchError(
                f"evaluate at {own}: got graphs of this length alone; expected those of the "
                "buckets, as all ranks gather parameters together (parameters='rounds'); pad to a "
                "bucket, or add this length to the buckets"
            )
        by_bucket = self._prepare(only, self._captured(only, planned.loss), planned.loss)
        return self._planned(only, by_bucket, degrees, start_s, planned.loss)

    def _captured(self, buckets: Buckets, loss: Loss | None) -> list[Program]:
        """Returns the traces of the model as it is for some buckets."""
        autocast = self.first.planned.autocast
        groups = buckets.by_trace().values()
        pieces = isinstance(loss, WithOutputs) and loss.kind == SHARDED
        return [replace(trace(self._model, b, autocast, loss), pieces=pieces) for b in groups]

    def _planned(
        self,
        buckets: Buckets,
        by_bucket: Mapping[Bucket, Runnable],
        degrees: Mapping[Bucket, int],
        start_s: float,
        loss: Loss | None,
        base: Edition | None = None,
    ) -> Edition:
        """Returns an edition of the model as it is, compared with it.

        With `base` it has the graphs of that edition, which were compared before.

        Raises:
            PlanError: a bucket does not fit.
        """
        first = self.first.planned
        with casting(self._device_type, None):
            ladder = TileLadder(by_bucket, first.request.tile)
            plans, tables, misfits, chosen = plan_with_degrees(
                ladder.priced, first.request, degrees, ladder.others
            )
            by_bucket = ladder.chosen(chosen)
        for error in () if self.partly else misfits.values():
            raise error
        for runnable in by_bucket.values():
            runnable.priced.placements.settle()
        planned = replace(
            first, by_bucket=by_bucket, plans=plans, tables=tables, loss=loss, misfits=misfits
        )
        dispatch = self._make_dispatch(buckets, planned)
        if base is not None:
            made = Edition.of(self._model, buckets, planned, base.verifier, dispatch)
            return replace(made, text=base.text)
        verifier = Verifier(self._model, buckets, planned, self.first.verifier.mode)
        problem = verifier.problem(time.perf_counter() - start_s)
        if problem is not None:
            raise problem
        made = Edition.of(self._model, buckets, planned, verifier, dispatch)
        # Those of the first edition are compared in steps.
        constants = [t for v in planned.traces for t in v.traced.program.constants.values()]
        sums = [checksum(t) for t in constants if not t.is_meta]
        return replace(
            made, text=f"{made.text}, checksums of constants {sums}" if sums else made.text
        )

    @property
    def made_later(self) -> list[Edition]:
        """Editions that are not the first, in the order in which they were made."""
        kinds = (self._by_modes, self._with_outputs, self._by_length)
        return [edition for kind in kinds for edition in kind.values()][1:]


def _degrees(planned: Planned) -> dict[Bucket, int]:
    """Returns the degree of each bucket: of one that fits on no rank, as in stages, it is 1."""
    plans = planned.plans
    return {b: plans[b].sp if b in plans else 1 for b in planned.by_bucket}
