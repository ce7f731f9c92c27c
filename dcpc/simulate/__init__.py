"""`dcpc simulate`: what dcpc and its baselines would take, on any number of ranks."""

from dcpc.simulate.batches import read_cost
from dcpc.simulate.command import (
    Request,
    default_degrees,
    simulate_cost,
    simulate_model,
    source_of,
)

__all__ = [
    "Request",
    "default_degrees",
    "read_cost",
    "simulate_cost",
    "simulate_model",
    "source_of",
]
