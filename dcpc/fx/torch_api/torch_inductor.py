"""Names that dcpc replaces in torch's Inductor while it compiles; imported there, not here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dcpc.fx.torch_api.patched import TorchName, has_owner, is_a, takes

_LOWERING = "torch._inductor.lowering"

SUMS = TorchName(
    "torch._inductor.codegen.cpp",
    "CppKernel.need_use_acc_helper",
    takes("self", "reduction_type", "dtype", "use_scalar"),
    "a graph may be compiled twice, for few and for many tokens",
)
WAIT = TorchName(
    "torch._inductor.async_compile",
    "AsyncCompile.wait",
    takes("self", "scope"),
    "each graph's kernels are compiled before the next graph is lowered",
)
LOWERINGS = TorchName(
    _LOWERING,
    "lowerings",
    is_a(dict),
    "an op that Inductor has no kernel for at open sizes ends a compilation",
)
LAYOUTS = TorchName(
    _LOWERING,
    "_maybe_layout_constraints",
    is_a(dict),
    "what attention is given is copied, and peaks are higher than planned",
)
CAN_FUSE = TorchName(
    "torch._inductor.choices",
    "InductorChoices.can_fuse",
    takes("scheduler", "node1", "node2", "shared_data_score"),
    "Inductor fuses across calls of library kernels, and peaks are higher than planned",
)


def settings(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those settings of Inductor that this torch has, and warns of the others."""
    without = "Inductor may change the order of a graph, and peaks are higher than planned"
    names = {key: TorchName("torch._inductor.config", key, has_owner, without) for key in wanted}
    return {key: value for key, value in wanted.items() if names[key].usable()}
