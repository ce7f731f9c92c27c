"""`python -m dcpc`, and `torchrun -m dcpc`: the command line."""

from dcpc.cli import app

app()
