"""Writes a variant's graphs as readable Python: named sizes, shapes in comments, plan on top."""

from __future__ import annotations

import re
from collections import Counter

import torch
from torch import Tensor, fx

from dcpc.ir import BucketPlan, Partition, Placement


def variant_source(parts: Partition, plan: BucketPlan, placement: Placement) -> str:
    """Returns the forward and backward of a partition as two Python functions."""
    labels = Counter(str(p.output).split("(")[0] for p in placement.nodes.values())
    lines = [
        f'"""bucket {plan.bucket}: sp {plan.sp}, micro-batch {plan.micro_batch}, '
        f"recompute {plan.recompute}.",
        "",
        f"Values: {', '.join(f'{n} {label}' for label, n in sorted(labels.items()))}.",
        f"Saved for backward: {len(parts.saved)} values. Why: {plan.reason}.",
        '"""',
        "",
        "import torch",
        "",
        *_function("forward", parts.forward, parts),
        "",
        "",
        *_function("backward", parts.backward, parts),
    ]
    return "\n".join(lines) + "\n"


def _function(name: str, gm: fx.GraphModule, parts: Partition) -> list[str]:
    sizes = {str(symbol): str(expr) for symbol, expr in parts.names.items()}
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    lines = [f"def {name}("]
    lines += [f"    {n.name},{_comment(n, sizes)}" for n in placeholders]
    lines.append("):")
    frees = _last_uses(gm)
    for node in gm.graph.nodes:
        if node.op == "call_function":
            lines.append(f"    {node.name} = {_call(node)}{_comment(node, sizes)}")
            if frees[node]:
                lines.append(f"    del {', '.join(frees[node])}")
        elif node.op == "output":
            values = ", ".join(_argument(v) for v in node.args[0])
            lines.append(f"    return ({values},)")
    return lines


def _last_uses(gm: fx.GraphModule) -> dict[fx.Node, list[str]]:
    """Returns node -> names of the values it reads last, which the running graph frees there."""
    seen: set[fx.Node] = set()
    frees: dict[fx.Node, list[str]] = {}
    for node in reversed(gm.graph.nodes):
        frees[node] = []
        for source in node.all_input_nodes:
            if source not in seen:
                seen.add(source)
                if isinstance(source.meta.get("val"), Tensor):
                    frees[node].append(source.name)
    return frees


def _call(node: fx.Node) -> str:
    arguments = [_argument(a) for a in node.args]
    arguments += [f"{k}={_argument(v)}" for k, v in node.kwargs.items()]
    infix = {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%"}
    name = getattr(node.target, "__name__", "")
    if getattr(node.target, "__module__", "") == "_operator":
        if name == "getitem":
            return f"{arguments[0]}[{arguments[1]}]"
        if name in infix:
            return f"{arguments[0]} {infix[name]} {arguments[1]}"
    return f"torch.ops.{node.target}({', '.join(arguments)})"


def _argument(value: object) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        inner = ", ".join(_argument(v) for v in value)
        return f"[{inner}]"
    if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
        return f"torch.device('{value}')" if isinstance(value, torch.device) else str(value)
    return repr(value)


def _comment(node: fx.Node, sizes: dict[str, str]) -> str:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return ""
    shape = ", ".join(_named(str(size), sizes) for size in value.shape)
    return f"  # {str(value.dtype).removeprefix('torch.')}[{shape}]"


def _named(size: str, sizes: dict[str, str]) -> str:
    return re.sub(r"[A-Za-z_]\w*", lambda match: sizes.get(match[0], match[0]), size)
