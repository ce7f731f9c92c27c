"""Lowers a program and its placement to one rank's forward graph."""
