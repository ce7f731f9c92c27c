"""`dcpc simulate`: what dcpc and its baselines would take, on any number of ranks."""

from dcpc.commands.simulate.batches import read_cost
from dcpc.commands.simulate.command import (
    SimulationRequest,
    default_degrees,
    simulate_cost,
    simulate_model,
    simulate_stages,
    source_of,
)

__all__ = [
    "SimulationRequest",
    "default_degrees",
    "read_cost",
    "simulate_cost",
    "simulate_model",
    "simulate_stages",
    "source_of",
]
