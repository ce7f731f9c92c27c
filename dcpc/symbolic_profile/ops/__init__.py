"""Costs of one op: FLOPs, bytes, transient memory, fusion."""
