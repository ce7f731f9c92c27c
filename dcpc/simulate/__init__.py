"""`dcpc simulate`: what dcpc and its baselines would take, on any number of ranks."""

from dcpc.simulate.batches import read_cost
from dcpc.simulate.command import Request, lengths_of, simulate_cost, simulate_model

__all__ = ["Request", "lengths_of", "read_cost", "simulate_cost", "simulate_model"]
