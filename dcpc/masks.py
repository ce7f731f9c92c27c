"""Masks of attention, recognised and replaced by what they say of positions: pass, edit, check."""

from dataclasses import replace

from dcpc.codegen.mask_check import wrong_masks
from dcpc.codegen.masks import apply_masks
from dcpc.ir import MaskPlan, Program
from dcpc.passes.masks import notes_of, recognise_masks


def without_masks(program: Program) -> Program:
    """Returns a program of the same numbers; masks it does not know are in its notes.

    What was recognised is compared with the masks' tensors; a mask that differs stays.
    """
    plan = recognise_masks(program)
    applied = apply_masks(program, plan)
    wrong = wrong_masks(program, applied, plan)
    return apply_masks(program, _without(program, plan, wrong)) if wrong else applied


def _without(program: Program, plan: MaskPlan, wrong: dict[str, str]) -> MaskPlan:
    """The plan of the other attentions, and why these are left out."""
    nodes = {n.name: n for n in program.gm.graph.nodes}
    refused: dict[tuple[str, str], list[str]] = {}
    for name, reason in wrong.items():
        refused.setdefault((str(nodes[name].args[3]), reason), []).append(name)
    decisions = {name: d for name, d in plan.decisions.items() if name not in wrong}
    return replace(plan, decisions=decisions, notes=(*plan.notes, *notes_of(program, refused)))
