"""From a global batch to a step plan: rows, table, deals, files."""
