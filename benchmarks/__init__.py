"""Benchmarks: `python -m benchmarks.NAME [--quick] [--json FILE]`, one module a subject."""
