"""Seeds of a compiled model's random numbers: of steps by their place, of calls by torch's seed."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import torch

from dcpc.ops.random import mix
from dcpc.runtime.groups.agreement import largest
from dcpc.runtime.groups.groups import Groups

_STEPS = 1 << 40


class Seeds:
    """Seeds of train steps and of calls by hand.

    Attributes:
        base: seed that those of train steps follow from, the same on every rank.
    """

    def __init__(self, base: int, groups: Groups) -> None:
        """Keeps a base seed.

        Args:
            base: seed that those of train steps follow from.
            groups: process groups, whose ranks make calls by hand together.
        """
        self.base = base
        self._groups = groups

    def of_micro_batch(self, epoch: int, step: int, number: int) -> int:
        """Returns the seed of a micro-batch of a train step, by its place in training."""
        return mix(self.base, _STEPS, epoch, step, number) >> 1

    def of_call(self, sp: int) -> int:
        """Returns the seed of a call by hand, the same on every rank of its group.

        Torch's own generator gives it, as it gives those of the plain model: after the same
        `torch.manual_seed` on these ranks come the same numbers. Collective over the group.

        Args:
            sp: degree of the call.
        """
        drawn = int(torch.randint(1 << 62, (), device="cpu"))
        return mix(self._groups.ranks(sp)[0], largest(self._groups, sp, drawn)) >> 1

    def state_dict(self) -> dict[str, Any]:
        """Returns the base and, of the first rank, the state of torch's generator; plain values."""
        if self._groups.rank:
            return {"base": self.base}
        state = torch.get_rng_state().numpy().tobytes()
        return {"base": self.base, "generator": base64.b64encode(state).decode()}

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """Goes on from the states of all ranks that there were: torch's generator does, too."""
        self.base = states[0]["base"]
        if "generator" in states[0]:
            state = bytearray(base64.b64decode(states[0]["generator"]))
            torch.set_rng_state(torch.frombuffer(state, dtype=torch.uint8))
