"""What the report says besides the table of plans."""
