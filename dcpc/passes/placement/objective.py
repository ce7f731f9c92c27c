"""The quantity that a placement minimises: the report's seconds and two additional terms."""

from __future__ import annotations

from dataclasses import dataclass

from dcpc.ir.thresholds import SENDING_LOSS
from dcpc.symbolic_profile.seconds.hardware import Device

TIE_S = 1e-9  # breaks ties: of two placements that send equal bytes, take fewer collectives
MOST_FOR_SENDING = 4.0  # seconds that a placement may cost more for a second of sending it saves


@dataclass(frozen=True, slots=True)
class Objective:
    """Seconds on a device, a price for saved bytes, and a tie-breaker.

    Attributes:
        device: device of a rank, whose rates give the seconds, calibrated if it is.
        held_s_per_byte: price in seconds of a byte of a saved activation on a rank. Zero minimises
            time alone, which at short lengths or over slow links means to replicate everything; but
            a group is formed to split memory.
        tie_s: seconds counted for the start of a collective, in place of its real ones, so that it
            only breaks ties; None: its real seconds.
        loss: share of the least cost that a placement which sends less may cost more.
        sending: multiple of the seconds of sending, real starts included, that is added.
    """

    device: Device
    held_s_per_byte: float = 0.0
    tie_s: float | None = None
    loss: float = 0.0
    sending: float = 0.0

    @classmethod
    def of_group(cls, device: Device, sp: int) -> Objective:
        """Returns the objective of a group of `sp` ranks.

        A byte kept for backward has the price of sending it once (what offloading it would cost).
        Whether the group pays at all, starts included, is the bucket's plan to decide.
        """
        return cls(device, 1.0 / device.link(sp).bytes_per_s, TIE_S, SENDING_LOSS)

    def __str__(self) -> str:
        """Returns the objective as the report's line."""
        start = "its seconds" if self.tie_s is None else f"{1e9 * self.tie_s:.3g} ns"
        return (
            "a placement weighs the seconds of this report, each byte that is kept for backward as "
            f"{1e9 * self.held_s_per_byte:.3g} ns, the time to send it once, and a collective's "
            f"start as {start}, which decides between equals alone"
            + f"; of placements within {self.loss:.0%} of the least it looks for the one that sends"
            " least" * bool(self.loss)
        )
