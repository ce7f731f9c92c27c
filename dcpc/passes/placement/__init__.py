"""What each value is split along: the cheapest of all placements."""
