"""Lines of the report below the table of plans."""
