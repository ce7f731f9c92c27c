"""What masks of attention say of positions and sequences."""
