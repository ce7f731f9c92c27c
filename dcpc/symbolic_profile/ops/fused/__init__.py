"""Kernels that Inductor makes of a list of calls."""
