"""Shared by commands: options, models and functions named as text."""
