"""Which dims are the same dim: factors, and the rules of every op."""
