"""Graphs that run: backends, guards, all ranks in one process, source."""
