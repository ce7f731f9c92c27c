"""Phase 2: decisions about a program, each a pure function: sharding, placement, the plan."""
