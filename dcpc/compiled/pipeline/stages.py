"""Stages that run: each stage's program through the passes, one symbolic graph for all shapes."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dcpc.buckets import Bucket
from dcpc.codegen import DividedRun, Variant, VariantCall, call_of
from dcpc.compiled.pipeline.chain import CallChain
from dcpc.compiled.pipeline.divided import PartCosts, StageParts
from dcpc.compiled.pipeline.programs import StageProgram, sizes_of_shapes, stage_programs
from dcpc.errors import DispatchError
from dcpc.ir import Placement, TensorInfo
from dcpc.passes.sharding.attention_ways import restricted
from dcpc.passes.sharding.sharding import analyse
from dcpc.plan.prices.studies import Study
from dcpc.plan.runnable import Runnable
from dcpc.plan.traced import Held, Traced
from dcpc.runtime.pipeline.stage import Shaped
from dcpc.symbolic_profile import Prediction
from dcpc.trace import casting


@dataclass(frozen=True, slots=True)
class _ForwardState:
    """The results of a stage's forward that its backward needs.

    Attributes:
        edges: place in autograd's graph where the backward of each sent value begins; None: it
            has no gradient.
        received: values that the stage received, whose gradients are asked for.
        sizes: lengths of the micro-batch.
        device: device that the values are on.
        variant: variant that ran.
        call: call of the variant; None: none of its outputs has a gradient.
    """

    edges: tuple[GradientEdge | None, ...]
    received: tuple[Tensor, ...]
    sizes: Mapping[str, int]
    device: torch.device
    variant: Variant
    call: VariantCall | None


@dataclass(frozen=True, slots=True)
class _WeightsState:
    """The results of the first part of a stage's backward that the second part needs.

    Attributes:
        run: run of both parts; None: there is no second one.
        call: call of the variant.
        values: values that the second part takes.
    """

    run: DividedRun | None
    call: VariantCall | None
    values: list[Any]


class ProgramStage:
    """A stage of a traced model; it is a `dcpc.runtime.pipeline.stage.Stage`.

    Attributes:
        index: place of the stage, from 0.
        count: number of stages of the pipeline.
        parameters: names of the model's parameters that it reads, each by its first name.
        learning: names of those parameters that learn.
        part: program of the stage.
        runnable: runnable of that program.
        menu_step: number of steps of recompute, of its own menu; see `recomputing`.
        sp: number of ranks that run it together. Each receives and sends values whole.
        lane: number of this rank among them; see `in_lane`.
    """

    def __init__(
        self,
        index: int,
        count: int,
        part: StageProgram,
        runnable: Runnable,
        model: nn.Module,
        sp: int = 1,
    ) -> None:
        """Binds a stage's program to the model's tensors."""
        self.index, self.count, self.part, self.runnable = index, count, part, runnable
        self.menu_step, self.sp, self.lane = 0, sp, 0
        self._placed_at: Mapping[str, int] | None = None
        self._homes: tuple[Bucket, ...] = ()
        self._parts = StageParts(runnable, part)
        first = {id(p): name for name, p in model.named_parameters()}
        held = runnable.traced.tensors()
        read = (first[id(held[n])] for n in part.program.parameters)
        self.parameters = tuple(dict.fromkeys(read))
        own = (first[id(held[n])] for n in part.program.learning if n in part.program.parameters)
        self.learning = tuple(dict.fromkeys(own))

    def recomputing(self, menu_step: int) -> ProgramStage:
        """Returns the same stage with so many steps of recompute; graphs are shared."""
        return self._with(menu_step=menu_step)

    def within(self, buckets: Sequence[Bucket]) -> ProgramStage:
        """Returns the same stage, which runs a micro-batch by the placement of its bucket."""
        ascending = sorted(buckets, key=lambda b: (b.tokens, b.shape_key))
        return self._with(_homes=tuple(ascending))

    def in_lane(self, lane: int) -> ProgramStage:
        """Returns the same stage as a rank of its group runs it; graphs are shared."""
        return self._with(lane=lane)

    def placed_at(self, sizes: Mapping[str, int]) -> ProgramStage:
        """Returns the same stage with one placement, for all sizes; graphs are shared."""
        return self._with(_placed_at=sizes)

    def _with(self, **changed: Any) -> ProgramStage:
        other = copy.copy(self)
        vars(other).update(changed)
        return other

    def placement(self, sizes: Mapping[str, int]) -> Placement:
        """Returns how its ranks split a micro-batch: as one of as many samples of its bucket."""
        own = (b for b in self._homes if all(sizes[n] <= most for n, most in b.shape_key))
        home = next(own, None)
        at = self._placed_at or (sizes if home is None else {**sizes, **dict(home.shape_key)})
        return self.runnable.priced.placement(at, self.sp)

    def forward(
        self, inputs: Mapping[str, Tensor], received: tuple[Tensor, ...], seed: int = 0
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Returns the values that the stage sends (the last one: the loss), and its saved state.

        Args:
            inputs: inputs of the model by name: those that the stage reads, and those that say all
                sizes.
            received: values that the stage before it sent.
            seed: seed of the micro-batch's random numbers, the same in all stages.

        Raises:
            DispatchError: an input or a received value is missing, or the shapes say not all sizes.
        """
        program = self.part.program
        if len(received) != len(self.part.received):
            raise DispatchError(
                f"stage {self.index}: got {len(received)} values; expected "
                f"{len(self.part.received)}; pass what stage {self.index - 1} sent"
            )
        learns = (info.requires_grad for info in self._infos(self.part.received))
        taken = dict(zip(self.part.received, map(self._leaf, received, learns), strict=True))
        missing = [
            n for p, n in program.inputs.items() if p not in self.part.received and n not in inputs
        ]
        if missing:
            raise DispatchError(
                f"stage {self.index}: got inputs {', '.join(inputs) or 'none'}; expected "
                f"{', '.join(missing)} too; pass the model's inputs to each stage that reads them"
            )
        given = {p: inputs[n].contiguous() for p, n in program.inputs.items() if p not in taken}
        sizes = self.sizes(inputs, received)
        variant, integers = self.variant(sizes)
        named = {**self.runnable.traced.tensors(), **given, **taken}
        with casting(_device_of(named), None):
            found = variant.outputs([named[p] for p in variant.placeholders], integers, seed)
        made = {**named, **dict(zip(program.outputs, found, strict=True))}
        values = [made[n] for n in self.part.sent]
        edges = tuple(get_gradient_edge(v) if v.requires_grad else None for v in values)
        sent = tuple(map(_alone, values))
        leaves = tuple(taken[n] for n in self.part.received)
        device = values[0].device
        return sent, _ForwardState(edges, leaves, sizes, device, variant, call_of(found))

    def backward(
        self, saved: _ForwardState, grads: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...]:
        """Adds to `.grad` of the stage's parameters; returns the gradients of received values.

        Each received value that learns has one, zeros where the loss does not depend on it. Where
        several ranks run the stage each adds its share of the parameters' gradients, and returns
        whole gradients, as it takes them.

        Args:
            saved: saved state of `forward`, used once.
            grads: gradient of each value that the stage sent; None counts as zeros.
        """
        begins: list[GradientEdge] = []
        gradients: list[Tensor] = []
        shapes = self.sent(saved.sizes)
        for edge, gradient, (shape, dtype) in zip(saved.edges, grads, shapes, strict=True):
            if edge is not None:
                begins.append(edge)
                if gradient is None:
                    gradient = torch.zeros(shape, dtype=dtype, device=saved.device)
                gradients.append(gradient)
        if begins:
            torch.autograd.backward(begins, gradients)
        return tuple(
            None if not r.requires_grad else torch.zeros_like(r) if r.grad is None else r.grad
            for r in saved.received
        )

    def backward_input(
        self, saved: _ForwardState, grads: tuple[Tensor | None, ...]
    ) -> tuple[tuple[Tensor | None, ...], _WeightsState]:
        """Returns the gradients of received values, and the state for `backward_weight`.

        It adds gradients of parameters that it comes by; the first stage, which receives nothing,
        goes back as far as the gradient that needs most. A backward of one part, as of a stage
        without parameters, is run as a whole.

        Args:
            saved: saved state of `forward`, used once.
            grads: gradients, as of `backward`.
        """
        given = dict(zip(self.part.sent, grads, strict=True))
        rest, found = _WeightsState(None, saved.call, []), dict[str, Tensor]()
        if saved.call is not None:
            outputs = self.part.program.outputs
            begins = [given.get(outputs[i]) for i, *_ in saved.call.begins]
            run = self._parts.run(saved.variant)
            if run is None:
                return self.backward(saved, grads), _WeightsState(None, None, [])
            found, values = run.run_first(saved.call, begins)
            rest = _WeightsState(run, saved.call, values)
        made = [_sum(found.pop(n, None), given.get(n)) for n in self.part.received]
        self._add(found)
        pairs = zip(made, saved.received, strict=True)
        return tuple(
            None if not r.requires_grad else torch.zeros_like(r) if g is None else g
            for g, r in pairs
        ), rest

    def backward_weight(self, rest: _WeightsState) -> None:
        """Adds the gradients to `.grad` of the parameters that `backward_input` has not.

        Args:
            rest: state from it, used once.
        """
        if rest.run is not None and rest.call is not None:
            self._add(rest.run.run_second(rest.call, rest.values))

    def _add(self, gradients: dict[str, Tensor]) -> None:
        """Adds gradients to parameters, as autograd does."""
        held = self.runnable.traced.tensors()
        while gradients:
            name, gradient = gradients.popitem()
            if name in held and held[name].requires_grad:
                torch.autograd.backward(held[name], gradient)

    def received(self, sizes: Mapping[str, int]) -> tuple[Shaped, ...]:
        """Returns shape and dtype of the values that the stage receives of a micro-batch."""
        return self._shaped(self._infos(self.part.received), sizes)

    def sent(self, sizes: Mapping[str, int]) -> tuple[Shaped, ...]:
        """Returns shape and dtype of the values that the stage sends; of the last one, its loss."""
        return self._shaped(self._infos(self.part.sent), sizes)

    def study(self, sizes: Mapping[str, int]) -> Study:
        """Returns the study of the stage's costs at any sizes, by a placement for these."""
        return self.runnable.priced.at(self.placement(sizes))

    def predict(self, sizes: Mapping[str, int]) -> Prediction:
        """Returns seconds and bytes of a micro-batch's forward and backward in the stage."""
        return self.study(sizes).predict(self.menu_step, sizes)

    def parts(self, sizes: Mapping[str, int]) -> PartCosts | None:
        """Returns the costs of the parts of a micro-batch's backward; None: it is not divided."""
        return self._parts.costs(self.placement(sizes), self.menu_step, sizes)

    def tensors(self) -> tuple[dict[int, Tensor], dict[int, nn.Parameter]]:
        """Returns the stage's parameters and buffers by id, and those parameters that learn."""
        held, program = self.runnable.traced.tensors(), self.part.program
        whole = {id(held[n]): held[n] for n in (*program.parameters, *program.buffers)}
        learning: Any = {id(held[n]): held[n] for n in program.learning if n in held}
        return whole, learning

    def variant(self, sizes: Mapping[str, int]) -> tuple[Variant, tuple[int, ...]]:
        """Returns the lane's variant at these sizes, compiled on first use, and its integers."""
        return self.runnable.variant(self.placement(sizes), self.menu_step, sizes, self.lane)

    def sizes(self, inputs: Mapping[str, Tensor], received: Sequence[Tensor]) -> dict[str, int]:
        """Returns the length of every dim, as the shapes of inputs and received values say.

        Raises:
            DispatchError: they do not say one.
        """
        known = [(info, inputs[n]) for n, info in self.part.given.items() if n in inputs]
        known += zip(self._infos(self.part.received), received, strict=True)
        found = sizes_of_shapes(self.part.program, known)
        missing = [n for n in self.part.program.symbols if n not in found]
        if missing:
            shapes = ", ".join(str(tuple(value.shape)) for _, value in known)
            raise DispatchError(
                f"stage {self.index}: got values of shapes {shapes or 'none'}; expected shapes "
                f"that say {', '.join(missing)}; pass all of the model's inputs to each stage"
            )
        return found

    @property
    def sends_learning(self) -> tuple[bool, ...]:
        """Whether each value that the stage sends has a gradient."""
        return tuple(info.requires_grad for info in self._infos(self.part.sent))

    def _infos(self, names: Sequence[str]) -> tuple[TensorInfo, ...]:
        return tuple(self.part.flowing[n] for n in names)

    def _shaped(self, infos: Sequence[TensorInfo], sizes: Mapping[str, int]) -> tuple[Shaped, ...]:
        dims = self.part.program.dims(sizes)
        return tuple((tuple(int(s.subs(dims)) for s in i.shape), i.dtype) for i in infos)

    @staticmethod
    def _leaf(value: Tensor, learns: bool) -> Tensor:
        return value.detach().contiguous().requires_grad_(learns and torch.is_grad_enabled())


def _alone(value: Tensor) -> Tensor:
    """Returns a value to be sent: a part of a larger memory would keep all of it."""
    sent = value.detach().contiguous()
    return sent if sent.untyped_storage().nbytes() == sent.nbytes else sent.clone()


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return one if other is None else other if one is None else one + other


def _device_of(values: Mapping[str, Tensor]) -> str:
    return next((v.device.type for v in values.values()), "cpu")


def stages_of(
    traced: Traced,
    model: nn.Module,
    chain: CallChain,
    borders: Sequence[int],
    sp: int = 1,
    homes: Mapping[str, int] = MappingProxyType({}),
) -> tuple[ProgramStage, ...]:
    """Returns the stages of a traced model.

    Args:
        traced: traced model.
        model: model that was traced.
        chain: chain of its program.
        borders: numbers of the chain's borders at which it is cut, its ends included.
        sp: number of ranks that run each stage together.
        homes: parameter -> stage that has it, as for `stage_programs`.
    """
    parts = stage_programs(traced.program, chain, borders, homes)
    return tuple(
        ProgramStage(j, len(parts), part, Runnable(_traced(traced, part, model)), model, sp)
        for j, part in enumerate(parts)
    )


def _traced(whole: Traced, part: StageProgram, model: nn.Module) -> Traced:
    """Returns the trace of a stage's program; derivatives of calls are those of the whole."""
    return replace(
        whole,
        program=part.program,
        sharding=restricted(part.program, analyse(part.program, False), whole.attention),
        tensors=Held(part.program, model),
        hands_over=False,
        tracers={},
    )
