"""Differences between the supported releases of torch, chosen by feature."""
