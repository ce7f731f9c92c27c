"""What to make again instead of keeping it: a menu of numbered plans."""
