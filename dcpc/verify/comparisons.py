"""Comparisons of a trace, of graphs and of calls with the plain model's outcomes.

A difference is a `VerifyError`; each comparison with its error becomes a line of the report.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial

import torch

from dcpc.codegen import LoweredPair, Variant, integers_of
from dcpc.errors import DcpcError, VerifyError
from dcpc.ir import Partition, Placement, Program
from dcpc.plan.runnable import RewrittenCall
from dcpc.plan.traced import Traced
from dcpc.verify.compare import (
    Compared,
    Given,
    Make,
    called,
    is_broken,
    known_run,
    runs_own_kernels,
)
from dcpc.verify.culprit import first_difference, reader
from dcpc.verify.draws import KnownParts
from dcpc.verify.exactness import (
    FINELY,
    LIMIT,
    MOVES,
    OWN_TIMES,
    ROUGHLY,
    ROUNDINGS,
    LossAndGradients,
    error_of,
    own_error,
)
from dcpc.verify.inputs import lowest
from dcpc.verify.points import Point
from dcpc.verify.references import PlainOutcomes, Reference

# In float64 throughout a constant that the trace rounded to the model's dtype is another number
# than the plain model's, which never rounded it. Such differences are smaller than this.
LIFTED = 1e-3
_REPORT = "report this with the model, it is a defect of dcpc; verify='off' trains on all the same"


class Comparisons:
    """Compares dcpc's graphs and calls of one model with it."""

    def __init__(self, references: PlainOutcomes, thorough: bool) -> None:
        self.references, self._thorough = references, thorough
        self.lines: list[str] = []
        self._done: set[int] = set()
        self._misread: set[str] = set()  # ops that were told
        self._kept: list[Partition] = []  # what `_done` has the ids of

    def trace(self, traced: Traced) -> None:
        """Compares the forward graph of a trace with the model, at each point there is time for."""
        program, done, budget = traced.program, list[str](), self.references.budget
        for reference in self.references.of(traced, alike=False):
            self._tell_misread(reference)
            found = self._compare(program, Given.of_program, reference)
            if found is None:
                continue
            if found.right and reference.wide and not done and budget.has_spare_time:
                # In the model's own dtypes, too, where it rounds and wraps as it will.
                own = self.references.rounded(reference)
                if own.outcome.finite:
                    rough = self._compare(program, Given.of_program, own)
                    found = rough if rough is not None and not rough.right else found
            if not found.right:
                if not reference.point.promised:
                    continue
                raise VerifyError(
                    "the captured graph does not compute what the model computes at "
                    f"{reference.point}: {found.error.gap}{reader(program, found.error.where)}; "
                    f"{self._advice(found.reference)}"
                )
            done.append(str(found))
        many = len(self.references.planned.traces) > 1
        name = f"trace {self.references.number(traced) + 1}" if many else "the trace"
        self._note(name, traced, done)

    def _advice(self, reference: Reference) -> str:
        """Returns the remedy for a difference from a model, which may differ from itself."""
        again = self.references.again(reference)
        error, _ = error_of(again, reference.outcome, ROUGHLY)
        if error.worst <= LIMIT:
            return _REPORT
        return (
            f"the plain model differs from itself when it is run twice ({error.gap}): its forward "
            "takes numbers from elsewhere (random, numpy, a clock, a counter), which a captured "
            "graph has as they were once; draw them by torch (torch.rand, dropout), or pass them "
            "as an input"
        )

    def _tell_misread(self, reference: Reference) -> None:
        """Warns once of each kernel of torch's that gives the plain model wrong gradients."""
        for op in sorted(reference.outcome.misread - self._misread):
            self._misread.add(op)
            text = (
                f"torch's own {op} gives the plain model wrong gradients at {reference.point}: it "
                "misreads a layout with a dim of size 1. dcpc hands it another layout and trains "
                "with the right gradients; see 'Kernels of torch that are wrong' in docs/limits.md"
            )
            self.lines.append(text)
            warnings.warn(text, UserWarning, stacklevel=2)

    def _note(self, name: str, traced: Traced, done: Sequence[str]) -> None:
        said = f"loss and every gradient at {', '.join(done)}"
        if not done:
            said = f"NOT compared with the model: {self.references.why_not(traced)}"
        self.lines.append(f"{name}: {said}")

    def call(self, traced: Traced, variant: Variant, name: str = "") -> None:
        """Compares a variant's call and its backward with the model, in the model's own dtypes.

        With two samples, and with one.

        Args:
            traced: the trace.
            variant: variant of one rank.
            name: name in the report; "": it is not in there.
        """
        if variant.draws:
            return
        compiled = variant.backend != "eager" and lowest(traced.program).itemsize < 4
        done: list[str] = []
        for reference in self.references.of(traced, alike=False):
            if done and not reference.point.lone:
                break
            dims = traced.program.dims(reference.point.sizes)
            values, broken = variant.integer_values(dims, 0)
            if broken or not reference.point.promised:
                continue
            own = self.references.rounded(reference)
            make = partial(called, variant=variant, integers=values)
            if compiled and reference.wide:
                done += self._own_dtype(traced.program, make, reference, name)
                continue
            found = self._compare(traced.program, make, own)
            if found is not None and own.outcome.finite and not found.right:
                raise VerifyError(
                    f"a call of the compiled model does not give what the model gives at "
                    f"{own.point}: {found.error.gap}, though its graphs do; {_REPORT}"
                )
            done.append(str(found))
            if reference.point.lone:
                break
        if name and done:
            self.lines.append(f"{name}: {', '.join(done)}")

    def composed(self, traced: Traced, make: Make, name: str, alike: bool) -> None:
        """Compares the parts of a program, run in turn, with the model, in its own dtypes."""

        def drawn(given: Given) -> LossAndGradients:
            with KnownParts(given.alike):
                return make(given)

        for reference in self.references.of(traced, alike):
            own = self.references.rounded(reference)
            if not own.outcome.finite or not own.point.promised:
                continue
            found = self._compare(traced.program, drawn, own)
            if found is None:
                continue
            if not found.right:
                raise VerifyError(
                    f"{name}, run in turn, do not compute what the model computes at {own.point}: "
                    f"{found.error.gap}; {_REPORT}"
                )
            self._note(name, traced, [str(found)])
            return
        self._note(name, traced, [])

    def rewritten(self, traced: Traced, call: RewrittenCall) -> None:
        """Compares a call of a program that was made of a trace, in the model's own dtypes."""
        run, alike = known_run(call), isinstance(call.runs[0], LoweredPair)
        if run is None or not self.references.fits():
            self.lines.append(f"{call.name}: NOT compared with the model")
            return
        dims = {n: call.sizes[n] for n in traced.program.symbols}
        own = self.references.of_inputs(dims, call.inputs, alike)

        def make(given: Given) -> LossAndGradients:
            other = Given(
                call.program, self.references.model, {**call.inputs, **call.others}, wide=False,
                alike=alike, wanted=given.wanted,
            )  # fmt: skip
            return run(other)

        found = self._compare(traced.program, make, own)
        if found is None or not own.outcome.finite:
            return
        if not found.right:
            raise VerifyError(
                f"{call.name} does not give what the model gives at {own.point}: "
                f"{found.error.gap}; {_REPORT}"
            )
        self._note(call.name, traced, [str(found)])

    def graphs(
        self,
        traced: Traced,
        placement: Placement,
        lowering: LoweredPair,
        parts: Partition,
        own: Sequence[Point] = (),
    ) -> None:
        """Compares forward and backward of all ranks of a group, with two samples and with one."""
        if id(parts) in self._done:
            return
        self._done.add(id(parts))
        self._kept.append(parts)
        sp = lowering.lowered.sp
        if sp != placement.sp:
            raise VerifyError(
                f"got graphs that are lowered for sp {sp}; expected sp {placement.sp}; {_REPORT}"
            )
        name = f"sp {sp}, {len(parts.saved)} values saved"
        if not self.references.fits():
            self.lines.append(f"{name}: NOT compared with the model: no room for two gradients")
            return
        done: list[str] = []
        for reference in self.references.of(traced, sp > 1, own):
            if done and not self._thorough and not reference.point.lone:
                break
            dims = traced.program.dims(reference.point.sizes)
            integers = integers_of(lowering.lowered, dims)
            if any(is_broken(lowering, each) for each in integers):
                continue
            make = partial(
                Given.of_partition, lowering=lowering, parts=parts, integers=integers, dims=dims
            )
            found = self._compare(traced.program, make, reference)
            if found is None or not (found.right or reference.point.promised):
                continue
            if not found.right:
                raise VerifyError(self._graphs_text(traced, found, lowering, parts))
            done.append(str(found))
            done += self._own_dtype(traced.program, make, reference, name, parts)
            if reference.point.lone and not self._thorough:
                break
        self._note(name, traced, done)

    def _graphs_text(
        self, traced: Traced, found: Compared, lowering: LoweredPair, parts: Partition
    ) -> str:
        program, at = traced.program, found.reference
        where, sp = reader(program, found.error.where), lowering.lowered.sp
        if sp == 1:
            given = self._given(program, at)
            (own,) = integers_of(lowering.lowered, program.dims(at.point.sizes))
            where = first_difference(program, given, lowering, parts, own) or where
        return (
            f"forward and backward at sp {sp} do not compute what the model computes at "
            f"{at.point}: {found.error.gap}{where}; {_REPORT}"
        )

    def _own_dtype(
        self,
        program: Program,
        make: Make,
        reference: Reference,
        name: str,
        parts: Partition | None = None,
    ) -> list[str]:
        """Compares a result in the model's dtypes, within multiples of the plain model's error.

        Args:
            program: program of the trace.
            make: function that computes loss and gradients.
            reference: outcome of the plain model; nothing is compared if not in float64.
            name: name of the compared thing.
            parts: graphs, compared if they run kernels that float64 has not; None: something else.
        """
        if not reference.wide or (parts is not None and not runs_own_kernels(parts)):
            return []
        own = self.references.rounded(reference)
        if not own.outcome.finite:
            return []
        made = self._made(program, make, own)
        if isinstance(made, Exception):
            raise VerifyError(
                f"{name} runs in float64, not in the model's own dtypes at {own.point}: {made}; "
                f"{_REPORT}"
            ) from made
        dtype = lowest(program)
        error, over = own_error(made, own.outcome, reference.outcome, dtype)
        rounds = bool(over) and self.references.rounds(made, reference, over, dtype, OWN_TIMES)
        found = Compared(own, error, not over or rounds, rounds)
        if not found.right:
            raise VerifyError(
                f"{name} does not compute in {dtype} what it does in float64, where it runs other "
                f"kernels, at {own.point}: {found.error.gap}; expected at most {OWN_TIMES:g} times "
                f"what the plain model loses in {dtype}; {_REPORT}"
            )
        return [str(found)]

    def _compare(self, program: Program, make: Make, reference: Reference) -> Compared | None:
        """Returns the difference from the plain model; None where it has no meaning.

        A graph that cannot run in float64, or differs a little there as its constants were rounded,
        is compared in the model's own dtypes.

        Raises:
            VerifyError: it cannot be run where the plain model can.
        """
        found = self._differ(program, make, reference)
        if isinstance(found, Compared):
            small = LIMIT < found.error.worst < LIFTED
            if found.right or not (reference.wide and small):
                return found
            again = self._differ(program, make, self.references.rounded(reference))
            return again if isinstance(again, Compared) and again.right else found
        if reference.wide and lowest(program) != torch.float64:
            again = self._differ(program, make, self.references.rounded(reference))
            if isinstance(again, Compared):
                return again
        if not reference.point.promised:
            return None
        first = (str(found).strip() or type(found).__name__).splitlines()[0]
        raise VerifyError(
            f"{type(found).__name__} at {reference.point}, where the model itself runs: {first}; "
            "report this with the model, it is a defect of dcpc; verify='off' trains on all the "
            "same"
        ) from found

    def _differ(self, program: Program, make: Make, reference: Reference) -> Compared | Exception:
        found = self._made(program, make, reference)
        if isinstance(found, Exception):
            return found
        floor = FINELY if reference.wide else ROUGHLY
        dtype = torch.float64 if reference.wide else lowest(program)
        limit = LIMIT if reference.wide else ROUNDINGS * torch.finfo(dtype).eps
        error, over = error_of(found, reference.outcome, floor, limit)
        rounds = bool(over) and self.references.rounds(found, reference, over, dtype, MOVES)
        return Compared(reference, error, not over or rounds, rounds)

    def _made(
        self, program: Program, make: Make, reference: Reference
    ) -> LossAndGradients | Exception:
        try:
            return make(self._given(program, reference))
        except (DcpcError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as failed:
            return failed

    def _given(self, program: Program, reference: Reference) -> Given:
        """Returns the inputs of a program's graphs for a comparison with an outcome."""
        return Given(
            program,
            self.references.model,
            reference.inputs,
            wide=reference.wide,
            alike=reference.alike,
            wanted=tuple(reference.outcome.gradients),
        )
