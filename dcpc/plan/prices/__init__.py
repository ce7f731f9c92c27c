"""Placements of a program, and the costs of its graphs."""
