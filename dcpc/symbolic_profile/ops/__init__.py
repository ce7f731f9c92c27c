"""What one op costs: FLOPs, bytes, transient memory, fusion."""
