"""Ops that gather, scatter and exchange the pieces that ranks have of a dim."""
