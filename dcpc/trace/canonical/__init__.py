"""Rewrites each op to one spelling, so that the sharding rules need only a few forms."""
