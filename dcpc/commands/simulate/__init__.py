"""`dcpc simulate`: predicted step times of dcpc and its baselines, on any number of ranks."""

from dcpc.commands.simulate.command import (
    SimulationRequest,
    default_degrees,
    simulate_cost,
    simulate_model,
    simulate_stages,
    source_of,
)
from dcpc.commands.simulate.formula import read_cost
