"""Makes runnable graphs: backends, guards, all ranks in one process, source."""
