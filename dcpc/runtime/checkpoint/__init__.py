"""Checkpoints: everything that training goes on from, in a folder that is whole or not there."""
