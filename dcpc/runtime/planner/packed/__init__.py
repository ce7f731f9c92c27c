"""Packed micro-batches planned: which sequences share a row, and which ranks run it when."""
