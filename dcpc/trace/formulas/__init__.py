"""Formulas, valid at symbolic lengths, for torch functions that make a tensor of numbers alone."""
