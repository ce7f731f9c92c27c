"""Ops that dcpc adds to torch: attention, random numbers of a seed, positions."""
