"""`python -m dcpc`, and `torchrun -m dcpc`: the command line."""

from dcpc.commands.cli import app

app()
