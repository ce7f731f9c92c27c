"""What a GPU is to show of dcpc: `python -m benchmarks.gpu_checks [--device cpu]`; see README.md.

Each step is a generator of rows, see `rows.py`, and runs in a process of its own, see `runner.py`.
"""
