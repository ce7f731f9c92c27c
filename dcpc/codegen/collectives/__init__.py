"""Pieces of factors, and the collectives that change them."""
