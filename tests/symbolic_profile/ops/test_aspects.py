"""Ops by aspects: what one table says of an op agrees with the other tables, and with torch.

An op that has a sharding rule has a row in each aspect, or stands here with the reason.
"""

import inspect
from collections.abc import Iterator

import pytest
import torch
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from dcpc.codegen.joint.position_tables import VIEWS
from dcpc.fx.fakes.view_fakes import VIEW_OPS
from dcpc.fx.writes import APART
from dcpc.passes.sharding.op_kinds import VIEW_KINDS
from dcpc.passes.sharding.rules import rule_table
from dcpc.symbolic_profile.ops import elements, flops
from dcpc.symbolic_profile.ops.gpu_transients import GPU_TRANSIENTS
from dcpc.symbolic_profile.ops.kernel_transients import KERNELS
from dcpc.symbolic_profile.ops.transients import TRANSIENTS

# Products whose FLOPs are no constant an element: a report names them, with what to register.
NO_CONSTANT = {
    "_cdist_backward", "_cdist_forward", "_pdist_backward", "_pdist_forward", "addbmm", "cholesky",
    "cholesky_solve", "linalg_cholesky_ex", "linalg_eig", "linalg_inv_ex", "linalg_lstsq",
    "linalg_lu", "linalg_matrix_exp", "linalg_pinv", "linalg_qr", "linalg_solve_triangular",
    "linear_backward", "matmul_backward", "triangular_solve",
}  # fmt: skip
# Priced by a formula of their own, or written out in other ops before a graph is priced.
ELSEWHERE = {"attention_backward", "attention_of_rows_backward", "masked_fill", "rsub"}


def overloads(name: str) -> Iterator[OpOverload]:
    """Yields the overloads of an op of torch or dcpc that make new tensors."""
    library, short = name.split(".")
    packet = getattr(getattr(torch.ops, library), short, None)
    for overload in () if packet is None else packet.overloads():
        op = getattr(packet, overload)
        text = str(op._schema)
        if torch._C._dispatch_has_kernel(op.name()) and "Dimname" not in text:
            yield op


def makes_new(op: OpOverload) -> bool:
    """Whether an op reaches a graph by itself and makes new memory."""
    composite = op.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)
    return not (composite or op.is_view or op._schema.is_mutable)


def ruled() -> list[str]:
    """Returns the ops with a rule, and what their gradients are made by."""
    names = [n for n in rule_table() if n.split(".")[0] in ("aten", "dcpc")]
    short = {n.removesuffix("_forward").removesuffix("_with_indices") for n in names}
    backward = {f"{n}_backward" for n in {*names, *short}} | {f"{n}_backward_data" for n in short}
    return [*names, *sorted(backward)]


def test_an_op_with_a_rule_has_a_price():
    unpriced = set()
    for name in ruled():
        for op in filter(makes_new, overloads(name)):
            own = name.split(".")[1]
            known = own in flops.MATMULS or op.overloadpacket in flop_registry
            if not known and elements.elementwise(op)[0] == "unpriced":
                unpriced.add(own)
    libraries = (torch.ops.aten, torch.ops.dcpc)
    there = {n for n in NO_CONSTANT if any(hasattr(library, n) for library in libraries)}
    assert unpriced == there | ELSEWHERE  # some releases lack `cholesky`


def test_an_op_has_one_price():
    tables = [elements.COPIES, [*elements.ELEMENTS], [*flops.MATMULS]]
    names = [n for table in tables for n in table]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize(
    "names",
    [
        elements.COPIES, elements.ELEMENTS, elements.LOOKUPS, flops.MATMULS,
        [n.split("::")[1] for n in (*TRANSIENTS, *GPU_TRANSIENTS)],
    ],
    ids=["copies", "elements", "lookups", "matmuls", "transients"],
)  # fmt: skip
def test_tables_name_ops_that_there_are(names):
    libraries = (torch.ops.aten, torch.ops.prims, torch.ops.dcpc)
    assert [n for n in names if not any(hasattr(library, n) for library in libraries)] == []


def test_every_collective_has_a_transient():
    rings = ("ring_attention_forward", "ring_attention_backward")
    names = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce", "swap", *rings)
    assert {f"dcpc::{name}" for name in names} <= {*TRANSIENTS}


def test_views_are_torchs_views():
    assert VIEW_OPS.keys() <= VIEWS
    assert {op for op in VIEWS if not op.is_view} <= APART


def test_rules_of_views_are_of_torchs_views():
    kinds = {name for name, rule in rule_table().items() if rule.kind in VIEW_KINDS}
    made = {op for name in kinds for op in overloads(name) if not op._schema.is_mutable}
    assert {op for op in made if not op.is_view} <= APART


def test_arguments_that_a_transient_copies_are_the_ops():
    """Releases name some anew: `grad` of distances is `grad_output` in others."""
    strange = []
    for op, formula in KERNELS.items():
        names = inspect.getclosurevars(formula).nonlocals.get("names", ())
        for overload in overloads(op.replace("::", ".")) if names else ():
            there = {argument.name for argument in overload._schema.arguments}
            strange += [f"{overload}: {name}" for name in names if name not in there]
    assert strange == []
