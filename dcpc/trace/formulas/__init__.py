"""What torch makes of numbers alone, by formulas that take a length."""
