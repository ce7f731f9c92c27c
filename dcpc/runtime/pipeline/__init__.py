"""Runs a model in stages, each on ranks of its own."""
