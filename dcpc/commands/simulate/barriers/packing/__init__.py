"""Samples put on groups of ranks, and made better there."""
