"""Reads ahead of the loop: steps in a thread, the samples of a stream in worker processes."""
