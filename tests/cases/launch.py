"""Runs a function on several gloo ranks of this machine: dcpc's own launcher, for the tests."""

from dcpc.runtime.groups.local_ranks import RanksError, run_ranks

__all__ = ["RanksError", "run_ranks"]
