"""Actions of each stage in a step, in order, and their costs: frozen data.

    F i    forward of micro-batch i: takes what the stage before sent, sends on
    B i    backward: takes the gradients that the next stage sent, sends its own back
    I i    the part of a backward that another stage waits for (gradients of what was received)
    W i    the rest of it (gradients of parameters): later, when the stage has nothing else to do

A stage has F and B, or F, I and W, of every micro-batch once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "F", "B", "I", "W"
KINDS = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)


class Action(NamedTuple):
    """One action of a stage.

    Attributes:
        kind: one of `KINDS`.
        micro_batch: number of the micro-batch in the step.
    """

    kind: str
    micro_batch: int

    @property
    def side(self) -> str:
        """Whether others wait for it as a forward or as a backward."""
        return FORWARD if self.kind == FORWARD else BACKWARD

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class PipelineSchedule:
    """The order of every stage, and how much it recomputes.

    Attributes:
        orders: actions of each stage, in the order in which it runs them.
        settings: [stage][micro-batch], place in the costs' list of settings (recompute).
    """

    orders: tuple[tuple[Action, ...], ...]
    settings: tuple[tuple[int, ...], ...]

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.orders)

    @classmethod
    def of_text(cls, text: str) -> PipelineSchedule:
        """Returns the schedule of which this is the text.

        Raises:
            ValueError: it is none.
        """
        rows = [row.partition(":") for row in text.split(";")]
        return cls(
            tuple(tuple(Action(w[0], int(w[1:])) for w in row[0].split()) for row in rows),
            tuple(tuple(int(k) for k in row[2].split()) for row in rows),
        )

    def __str__(self) -> str:
        """Returns it as text: the stages, each with its actions and its settings."""
        return ";".join(
            f"{' '.join(map(str, order))}:{' '.join(map(str, settings))}"
            for order, settings in zip(self.orders, self.settings, strict=True)
        )

    def only(self, kept: Sequence[int]) -> PipelineSchedule:
        """Returns the schedule of some of its micro-batches, which are numbered anew."""
        number = {i: new for new, i in enumerate(kept)}
        orders = (
            tuple(Action(a.kind, number[a.micro_batch]) for a in o if a.micro_batch in number)
            for o in self.orders
        )
        return PipelineSchedule(
            tuple(orders), tuple(tuple(row[i] for i in kept) for row in self.settings)
        )


@dataclass(frozen=True, slots=True)
class StageCost:
    """Costs of one micro-batch on one stage with one setting of recompute.

    A stage "holds" the bytes it keeps from the end of a forward to the start of its backward.

    Attributes:
        forward_s: seconds of forward.
        backward_s: seconds of the whole backward, recompute included.
        weight_s: seconds of the part that may run later (W); 0: the backward is not split.
        held_bytes: bytes kept from forward to backward.
        forward_bytes: peak during forward, beside the bytes held for other micro-batches.
        backward_bytes: peak during backward, likewise; this one's held bytes included.
        weight_bytes: bytes kept from I to W.
        input_bytes: peak during I, as `backward_bytes`.
        work_bytes: peak during W, likewise; bytes kept from I included.
        sent_held_bytes: bytes of the message to the next stage that it holds anyway.
        back_kept_bytes: bytes of the message of I that it keeps for W anyway.
    """

    forward_s: float
    backward_s: float
    weight_s: float = 0.0
    held_bytes: float = 0.0
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    weight_bytes: float = 0.0
    input_bytes: float = 0.0
    work_bytes: float = 0.0
    sent_held_bytes: float = 0.0
    back_kept_bytes: float = 0.0

    def most_bytes(self, kind: str) -> float:
        """Returns the peak during an action, beside the bytes held for others."""
        if kind == FORWARD:
            return self.forward_bytes
        if kind == BACKWARD:
            return self.backward_bytes
        if kind == BACKWARD_WEIGHT:
            return max(self.work_bytes, self.weight_bytes)
        return max(self.input_bytes, self.held_bytes, self.weight_bytes)

    @property
    def input_s(self) -> float:
        """Seconds of the backward that the stage before waits for."""
        return self.backward_s - self.weight_s


@dataclass(frozen=True, slots=True)
class Hop:
    """Costs of a micro-batch's messages between two neighbouring stages.

    Attributes:
        forward_s: seconds on the wire, to the later stage.
        backward_s: seconds on the wire, back.
        forward_bytes: bytes sent to the later stage.
        backward_bytes: bytes sent back.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class PipelineWork:
    """The micro-batches of a step on all stages.

    Attributes:
        costs: [stage][micro-batch][setting]; the first setting is the fastest, later ones hold
            less.
        hops: [stage][micro-batch], from the stage to the next one; one fewer than stages.
        memory_bytes: memory of each stage for activations (parameters and their like taken off).
    """

    costs: tuple[tuple[tuple[StageCost, ...], ...], ...]
    hops: tuple[tuple[Hop, ...], ...]
    memory_bytes: tuple[float, ...]

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.costs)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of the step."""
        return len(self.costs[0])

    @property
    def fastest(self) -> tuple[tuple[int, ...], ...]:
        """The setting 0 everywhere, [stage][micro-batch]."""
        return ((0,) * self.micro_batches,) * self.stages

    def busy_s(self, stage: int, settings: tuple[int, ...]) -> float:
        """Returns the seconds that a stage computes in the step."""
        found = (row[k] for row, k in zip(self.costs[stage], settings, strict=True))
        return sum(c.forward_s + c.backward_s for c in found)
