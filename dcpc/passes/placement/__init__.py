"""Chooses the dim along which each value is split: the cheapest of all placements."""
