"""Seeds of a compiled model's random numbers: they follow from the place in training alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dcpc.ops.random import mix

# Keeps the random numbers of train steps apart from those of calls, which count up from 1.
_STEPS = 1 << 40


class Seeds:
    """Seeds of train steps and of calls by hand.

    Attributes:
        base: of all of them, the same on every rank.
    """

    def __init__(self, base: int, rank: int, world: int) -> None:
        """Begins with the first call of each degree.

        Args:
            base: of all random numbers.
            rank: this one.
            world: how many there are.
        """
        self.base = base
        self._rank, self._world = rank, world
        self._calls: dict[int, int] = {}

    def of_micro_batch(self, epoch: int, step: int, number: int) -> int:
        """Returns the seed of a micro-batch of a train step, by its place in training."""
        return mix(self.base, _STEPS, epoch, step, number) >> 1

    def of_call(self, sp: int, first: int) -> int:
        """Returns the seed of the next call at a degree, the same on every rank of its group.

        The ranks of a group make the same calls at its degree, so counting them needs no message.

        Args:
            sp: the degree.
            first: rank of the group.
        """
        self._calls[sp] = self._calls.get(sp, 0) + 1
        return mix(self.base, sp, first, self._calls[sp]) >> 1

    def state_dict(self) -> dict[str, Any]:
        """Returns the base, and how many calls there were at each degree, as plain values."""
        return {"base": self.base, "calls": dict(self._calls)}

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """Goes on from the states of all ranks that there were.

        With as many ranks as there are now each goes on from its own. Else calls are counted from
        the largest of all on, so that no number comes twice.
        """
        self.base = states[0]["base"]
        counted = [state["calls"] for state in states]
        if len(states) == self._world:
            counted = [counted[self._rank]]
        self._calls = {sp: max(c.get(sp, 0) for c in counted) for sp in set().union(*counted)}
