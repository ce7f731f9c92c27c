"""Refuses products of operands with several dtypes, which torch refuses only when they run."""

from __future__ import annotations

import torch

from dcpc.errors import TraceError
from dcpc.ir import Program, tensor_operands

aten = torch.ops.aten

# Products: fake tensors take the first operand's dtype for the result's, and say nothing.
_PRODUCTS = {
    aten.linear.default, aten.matmul.default, aten.mm.default, aten.bmm.default,
    aten.addmm.default, aten.baddbmm.default, aten.conv1d.default, aten.conv2d.default,
    aten.conv3d.default, aten.convolution.default, aten.scaled_dot_product_attention.default,
}  # fmt: skip


def refuse_mixed(program: Program) -> None:
    """Refuses a matrix product whose operands have several floating dtypes.

    Raises:
        TraceError: names the op, its operands and where it is in the model.
    """
    for node in program.gm.graph.nodes:
        if node.target not in _PRODUCTS:
            continue
        operands = tensor_operands(node, program.info)
        dtypes = [program.info[n.name].dtype for n in operands]
        floats = {d for d in dtypes if d.is_floating_point}
        if len(floats) < 2:
            continue
        names = {**program.parameters, **program.buffers, **program.inputs}
        each = ", ".join(
            f"{names.get(n.name, n.name)} {str(d).removeprefix('torch.')}"
            for n, d in zip(operands, dtypes, strict=True)
        )
        raise TraceError(
            f"the model's {node.name} ({node.target}): got operands of several dtypes: {each}; "
            "expected one dtype, as torch has it when this runs; cast one of them in forward, "
            "convert the model by .to(dtype), or compile with autocast="
        )
