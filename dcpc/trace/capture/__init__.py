"""Runs `torch.export` on a module, and checks every assumption that it made."""
