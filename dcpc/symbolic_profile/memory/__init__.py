"""Live bytes over time: lifetimes, allocator, optimizer."""
