"""`dcpc NAME` on the command line, a folder for each command."""
