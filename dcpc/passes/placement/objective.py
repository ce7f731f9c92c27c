"""What a placement minimises: the seconds that the report has, and two named terms beside them."""

from __future__ import annotations

from dataclasses import dataclass

from dcpc.symbolic_profile.seconds.hardware import Device

TIE_S = 1e-9  # of two placements that send the same bytes, the one with fewer collectives


@dataclass(frozen=True, slots=True)
class Objective:
    """Seconds on a device, a price for held bytes, and what decides between equals.

    Attributes:
        device: one rank's; seconds are `symbolic_profile.seconds`' of it, calibrated if it is.
        held_s_per_byte: price of a byte of an activation that a rank keeps for backward. Zero asks
            for the least time alone, which at short lengths or over slow links is to replicate
            everything; a group is formed to split memory.
        tie_s: what the start of a collective counts in place of its seconds, so that it decides
            between equals alone; None: its seconds.
    """

    device: Device
    held_s_per_byte: float = 0.0
    tie_s: float | None = None

    @classmethod
    def of_group(cls, device: Device, sp: int) -> Objective:
        """Returns what the placement of a group of `sp` ranks minimises.

        A byte kept for backward has the price of sending it once (what offloading it would cost).
        Whether the group pays at all, starts included, is the bucket's plan to decide.
        """
        return cls(device, 1.0 / device.link(sp).bytes_per_s, TIE_S)

    def __str__(self) -> str:
        """What is weighed, as the report's line says it."""
        start = "its seconds" if self.tie_s is None else f"{1e9 * self.tie_s:.3g} ns"
        return (
            "a placement weighs the seconds of this report, each byte that is kept for backward as "
            f"{1e9 * self.held_s_per_byte:.3g} ns, the time to send it once, and a collective's "
            f"start as {start}, which decides between equals alone"
        )
