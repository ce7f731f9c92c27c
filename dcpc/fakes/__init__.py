"""Fake tensors that are told from the expressions of their sizes, where torch would ask of each."""

from dcpc.fakes.dense import dense_result
from dcpc.fakes.layouts import Layout, fills_its_memory, layout_of
from dcpc.fakes.made import KeepingEnv, empty, strided
from dcpc.fakes.telling import telling

__all__ = [
    "KeepingEnv",
    "Layout",
    "dense_result",
    "empty",
    "fills_its_memory",
    "layout_of",
    "strided",
    "telling",
]
