"""`dcpc simulate`: what dcpc and its baselines would take, on any number of ranks."""

from dcpc.commands.simulate.command import (
    SimulationRequest,
    default_degrees,
    simulate_cost,
    simulate_model,
    simulate_stages,
    source_of,
)
from dcpc.commands.simulate.formula import read_cost

__all__ = [
    "SimulationRequest",
    "default_degrees",
    "read_cost",
    "simulate_cost",
    "simulate_model",
    "simulate_stages",
    "source_of",
]
