"""One rank's forward graph of a program and its placement."""
