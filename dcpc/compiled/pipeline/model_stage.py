"""A stage of a model: a program for each of its traces, and the memory that its rank keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from dcpc.buckets import Fixed, held_by
from dcpc.compiled.pipeline.stages import ProgramStage
from dcpc.runtime.parameters.modes import shares
from dcpc.runtime.parameters.reduction import COMM_BUCKET_BYTES
from dcpc.symbolic_profile import OptimizerMemory


@dataclass(frozen=True, slots=True, eq=False)
class ModelStage:
    """A stage of a model; each rank of it has the parameters of all of its programs.

    Attributes:
        programs: dims that a trace has as numbers (`Buckets.fixed`) -> its program.
    """

    programs: Mapping[Fixed, ProgramStage]

    @property
    def by_trace(self) -> tuple[ProgramStage, ...]:
        """Programs in the order of the traces."""
        return tuple(self.programs.values())

    @property
    def index(self) -> int:
        """Place of the stage, from 0."""
        return self.by_trace[0].index

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the model's parameters that it reads in some trace."""
        return tuple(dict.fromkeys(n for each in self.by_trace for n in each.parameters))

    @property
    def learning(self) -> tuple[str, ...]:
        """Those of them that learn."""
        return tuple(dict.fromkeys(n for each in self.by_trace for n in each.learning))

    def at(self, sizes: Mapping[str, int]) -> ProgramStage:
        """Returns the program of micro-batches of these sizes."""
        return held_by(self.programs, sizes)


@dataclass(frozen=True, slots=True)
class StageState:
    """Memory of a rank that is there whatever its stage runs.

    Attributes:
        resident_bytes: bytes of parameters, buffers, gradients and the optimizer's state.
        step_bytes: bytes that the optimizer's step takes besides, when no micro-batch has any.
    """

    resident_bytes: int
    step_bytes: int

    @classmethod
    def of(cls, programs: Sequence[ProgramStage], optimizer: OptimizerMemory) -> StageState:
        """Returns the memory that a rank keeps for a stage."""
        held: dict[int, Tensor] = {}
        learning: dict[int, nn.Parameter] = {}
        for each in programs:
            whole, own = each.tensors()
            held |= whole
            learning |= own
        learned = [*learning.values()]
        whole_bytes, trained_bytes = (
            sum(t.nbytes for t in every) for every in (held.values(), learned)
        )
        state = sum(states_of(learned, optimizer).values()) + (optimizer.given_bytes or 0)
        if optimizer.owners > 1:  # one comm bucket on its way: what is sent, and what arrives
            state += 2 * min(trained_bytes, COMM_BUCKET_BYTES)
        stepped = optimizer.step_bytes(_rows_of(learned, optimizer))
        return cls(whole_bytes + trained_bytes + state, stepped)


def states_of(learned: Sequence[nn.Parameter], optimizer: OptimizerMemory) -> dict[int, int]:
    """Returns id of a parameter -> bytes that a rank keeps of its optimizer's state."""
    own = _rows_of(learned, optimizer)
    states = optimizer.state_bytes(learned, own)
    return {id(p): states.get(id(q), 0) for p, q in zip(learned, own, strict=True)}


def _rows_of(learned: Sequence[nn.Parameter], optimizer: OptimizerMemory) -> Sequence[nn.Parameter]:
    return shares(learned, optimizer.owners) if optimizer.owners > 1 else learned


def shared_parameters(stages: Sequence[ModelStage]) -> dict[str, tuple[int, ...]]:
    """Returns the parameters that several stages learn -> these stages, whose gradients add up."""
    readers: dict[str, list[int]] = {}
    for stage in stages:
        for name in stage.learning:
            readers.setdefault(name, []).append(stage.index)
    return {name: tuple(found) for name, found in readers.items() if len(found) > 1}
