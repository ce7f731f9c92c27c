"""Finds dims that are the same dim (factors), and the sharding rule of every op."""
