"""Cuts a chain of blocks into pipeline stages on equal or unequal devices."""
