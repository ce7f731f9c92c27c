"""Masks of attention, recognised and replaced by what they say of positions: pass and edit."""

from dcpc.codegen.masks import apply_masks
from dcpc.ir import Program
from dcpc.passes.masks import recognise_masks


def without_masks(program: Program) -> Program:
    """Returns a program of the same numbers; masks it does not know are in its notes."""
    return apply_masks(program, recognise_masks(program))
