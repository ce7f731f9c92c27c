"""Builds forward and backward as one graph, and splits it by the recompute plan."""
