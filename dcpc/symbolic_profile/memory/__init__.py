"""Which bytes are alive when: lifetimes, allocator, optimizer."""
