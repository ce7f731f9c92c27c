"""Prepares one program for planning: its tensors, its possible shardings, its lowered graphs.

`traced` is the preparation of whatever is planned, checked or calibrated: trace, masks, sharding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from dcpc.buckets import Buckets, Sizes
from dcpc.codegen import Library, LoweredPair, Tracer, decompositions
from dcpc.codegen.lower.mask_check import wrong_masks
from dcpc.codegen.lower.masks import apply_masks
from dcpc.errors import DispatchError
from dcpc.ir import GatherUnits, MaskPlan, Placement, Program
from dcpc.passes.dtypes import refuse_mixed
from dcpc.passes.masks.masks import notes_of, recognise_masks
from dcpc.passes.sharding.attention_ways import restricted
from dcpc.passes.sharding.sharding import Sharding, analyse
from dcpc.symbolic_profile import Away, Device
from dcpc.trace import trace
from dcpc.trace.loss import Loss

Hints = tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class PlacementId:
    """Short key that equal placements of one program share.

    Attributes:
        sp: ranks of the group.
        split: number that placements with the same sharding share, at any degree.
    """

    sp: int
    split: int


@dataclass(frozen=True, eq=False)
class Traced:
    """A program on one device, with caches of everything derived from it.

    Attributes:
        program: traced model.
        sharding: factors of the program's dims, and alternatives of its nodes.
        device: device for which costs are predicted.
        backend: "eager" or "inductor".
        tensors: function that returns placeholder name -> parameter, buffer or constant.
        reference: lengths at which choices of recompute are weighed: those of the largest bucket;
            None: those of the trace.
        hands_over: whether each gradient is consumed and freed as soon as backward has computed it.
        units: parameters that graphs gather, of which a rank holds its rows; None: each rank holds
            all.
        libraries: backend -> derivatives of calls, shared between programs of one model.
        attention: how attention may be split, as for `restricted`.
        tracers: backend -> differentiator of the program's lowered graphs.
        whole: program as it was captured, if this one runs parts of it in tiles.
        away: places where saved values may wait for backward; None: they stay.
    """

    program: Program
    sharding: Sharding
    device: Device
    backend: str
    tensors: Callable[[], Mapping[str, Tensor]]
    reference: Sizes | None = None
    hands_over: bool = False
    units: GatherUnits | None = None
    libraries: dict[str, Library] = field(default_factory=dict)
    attention: str = "auto"
    tracers: dict[str, Tracer] = field(default_factory=dict)
    whole: Program | None = None
    away: Away | None = None
    _ids: dict[tuple[int, int], tuple[Placement, PlacementId]] = field(
        init=False, default_factory=dict
    )
    _splits: dict[tuple[object, ...], int] = field(init=False, default_factory=dict)
    _lowerings: dict[tuple[object, ...], LoweredPair] = field(init=False, default_factory=dict)

    def id_of(self, placement: Placement) -> PlacementId:
        """Returns the short key of a placement of the program."""
        seen = (placement.sp, id(placement.nodes))  # kept, so that no other has this id
        if seen not in self._ids:
            _, *split = placement.key()
            number = self._splits.setdefault(tuple(split), len(self._splits))
            self._ids[seen] = placement, PlacementId(placement.sp, number)
        return self._ids[seen][1]

    def lowering(
        self,
        placement: Placement,
        hints: Hints = None,
        backend: str = "",
        *,
        any_degree: bool = False,
        gathers: bool = True,
    ) -> LoweredPair:
        """Returns the lowered and differentiated graph of a placement.

        Args:
            placement: placement of the program.
            hints: sizes to trace at, () for the usual ones; None: traced with all other graphs.
            backend: backend of the graph; default: the model's.
            any_degree: whether the graph should serve other degrees, too; see `LoweredPair`.
            gathers: whether the graph gathers the parameters of `units`; else it takes them whole.
        """
        backend = backend or self.backend
        units = self.units if gathers else None
        key = self.id_of(placement), hints, backend, any_degree, units is not None
        if key not in self._lowerings:
            tracer, group = self.tracer(backend, hints), group_name(placement.sp)
            made = LoweredPair(
                tracer, placement, group, backend, any_degree=any_degree, units=units,
                store="" if self.away is None else self.away.store,
            )  # fmt: skip
            self._lowerings[key] = made
        return self._lowerings[key]

    def staying(self, lowering: LoweredPair) -> frozenset[int] | None:
        """Returns the numbers of the gradients that live to the end of backward; None: all do.

        If gradients are handed over, only those of parameters read under two names stay, as each is
        a sum of two. Inductor runs the whole of backward as one call.
        """
        if not self.hands_over or lowering.backend != "eager":
            return None
        held = self.tensors()
        read = Counter(id(held[name]) for name in self.program.parameters)
        trained = enumerate(lowering.joint.trainable)
        return frozenset(number for number, name in trained if read[id(held[name])] > 1)

    def tracer(self, backend: str, hints: Hints = None) -> Tracer:
        """Returns the differentiator of lowered graphs; without hints all placements share it."""
        if hints is not None:
            return Tracer(self.program, self.tensors(), self._library(backend), hints)
        if backend not in self.tracers:
            if backend not in self.libraries:
                self.libraries[backend] = self._library(backend)
            library = self.libraries[backend]
            self.tracers[backend] = Tracer(self.program, self.tensors(), library)
        return self.tracers[backend]

    def _library(self, backend: str) -> Library:
        return Library(decompositions(backend), self.device.gpu)


def traced(
    model: nn.Module,
    buckets: Buckets,
    device: Device,
    backend: str,
    *,
    autocast: torch.dtype | None = None,
    derive_rules: bool = True,
    attention: str = "auto",
    libraries: dict[str, Library] | None = None,
    loss: Loss | None = None,
    program: Program | None = None,
) -> Traced:
    """Returns a model captured for buckets that share a trace.

    Args:
        model: the user's module.
        buckets: buckets to trace for; no dim is 1 in only some of them.
        device: device for which costs are predicted.
        backend: "eager" or "inductor".
        autocast: dtype of the autocast that the model runs under; None: no autocast.
        derive_rules: whether ops without a sharding rule are run on small pieces to find one.
        attention: allowed way to shard attention, or "auto".
        libraries: derivatives shared with other traces of the model.
        loss: loss function of the model's outputs; None: the model's forward returns the loss.
        program: program of the model, if it is already traced.

    Raises:
        TraceError: the model cannot be captured, or multiplies tensors of two dtypes.
    """
    program = program or trace(model, buckets, autocast, loss)
    refuse_mixed(program)
    program = without_masks(program)
    sharding = restricted(program, analyse(program, derive_rules), attention)
    shared = {} if libraries is None else libraries
    held = Held(program, model)
    return Traced(program, sharding, device, backend, held, libraries=shared, attention=attention)


def without_masks(program: Program) -> Program:
    """Returns an equal program whose recognised masks are replaced; its notes name the others.

    Each recognised mask is compared with the mask's tensor; one that differs stays as it is.
    """
    plan = recognise_masks(program)
    applied = apply_masks(program, plan)
    wrong = wrong_masks(program, applied, plan)
    return apply_masks(program, _without(program, plan, wrong)) if wrong else applied


def _without(program: Program, plan: MaskPlan, wrong: Mapping[str, str]) -> MaskPlan:
    """Returns the mask plan without the attentions in `wrong`, with notes that say why."""
    nodes = {n.name: n for n in program.gm.graph.nodes}
    refused: dict[tuple[str, str], list[str]] = {}
    for name, reason in wrong.items():
        refused.setdefault((str(nodes[name].args[3]), reason), []).append(name)
    decisions = {name: d for name, d in plan.decisions.items() if name not in wrong}
    return replace(plan, decisions=decisions, notes=(*plan.notes, *notes_of(program, refused)))


class Held:
    """Finds the model's tensors by placeholder, afresh in each call, as a model may replace one.

    Raises:
        DispatchError: the model lost a parameter since it was traced.
    """

    def __init__(self, program: Program, model: nn.Module) -> None:
        self._constants = dict(program.constants)
        self._names = {**program.parameters, **program.buffers}
        self.bind(model)

    def bind(self, model: nn.Module) -> None:
        """Looks up the modules that own the tensors again: a submodule may have been replaced."""
        self._places: list[tuple[str, dict[str, Any], str, nn.Module]] = []
        for placeholder, name in self._names.items():
            owner, _, leaf = name.rpartition(".")
            module = model.get_submodule(owner)
            # A module's own look-up takes 2 us, of each tensor in each call.
            kinds: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            own = next((kind for kind in kinds if leaf in kind), vars(module))
            self._places.append((placeholder, own, leaf, module))

    def __call__(self) -> dict[str, Tensor]:
        """Returns placeholder name -> parameter, buffer or constant."""
        held = dict(self._constants)
        for placeholder, own, leaf, module in self._places:
            value = own.get(leaf)
            if not isinstance(value, Tensor):
                raise DispatchError(
                    f"the model has no parameter or buffer '{leaf}' in {type(module).__name__} any "
                    "more; expected the module that was compiled; compile it again"
                )
            held[placeholder] = value
        return held


def group_name(sp: int) -> str:
    """Returns the name by which variants find the process group of a degree."""
    return f"sp{sp}"
