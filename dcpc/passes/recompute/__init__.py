"""Chooses the values to recompute instead of saving them: a menu of numbered plans."""
