"""Runs compiled variants: process groups, batches dealt out to the ranks, the train step."""
