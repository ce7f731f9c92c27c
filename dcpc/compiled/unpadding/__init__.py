"""Calls that run without their padding."""
