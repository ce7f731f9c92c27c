"""Writes docs/walkthrough.md: two layers followed through all phases."""

from pathlib import Path

import torch
from torch import Tensor, nn

import dcpc
from dcpc.ir import Placement, Program
from dcpc.passes.sharding.sharding import Alternative, Sharding

OUT = Path(__file__).parent.parent / "docs" / "walkthrough.md"
BUCKETS = dcpc.Buckets(
    inputs={"x": "float32[batch, seq, 8]", "y": "float32[batch, seq, 8]"},
    sizes=[{"seq": 64}, {"seq": 1_000_000}],
)
MEMORY = 200_000_000
NEXT = "\n" + 25 * " "  # the next alternative of a node, under the first
TEXT = """# A small model through all phases

`python -m examples.walkthrough` writes this page; a test compares it with the phases' output of
today. The plan is for two H200, of which each may use 200 MB, so nothing here depends on the
machine that wrote it. Words are in the [glossary](glossary.md).

## 1. The model and its buckets

Two layers, `h + gelu(linear(h))`, and a mean squared error. The buckets are {buckets}.

## 2. Trace: one graph for all lengths ([trace](../dcpc/trace/README.md))

Every size is a number or a named dim. The mean is a sum over the global count.

```text
{program}
```

## 3. Rules and factors: the ways to split each node ([sharding](../dcpc/passes/sharding/README.md))

Labels of the operands, then the label of the result. The first alternative is always "replicated".
`shard(1)` is a piece of dim 1, and `partial` is a sum that is still spread over the ranks.

```text
{alternatives}
```

## 4. Placement: one alternative for each node ([placement](../dcpc/passes/placement/README.md))

For {long} and two ranks. The cheapest splits the sequence until the sum.

```text
{placement}
```

## 5. Lowering and joint graph: the code of one rank ([codegen](../dcpc/codegen/README.md))

Local lengths are integer inputs, so both ranks run this forward, at any length:

```python
{forward}
```

## 6. Profile ([profile](../dcpc/symbolic_profile/README.md)) and [plan](../dcpc/plan/README.md)

The profile turns both graphs into formulas. The plan takes for each bucket the least recompute
that fits. [report.md](report.md) explains each line.

```text
{report}
```

## 7. Run and verify ([runtime](../dcpc/runtime/README.md), [verify](../dcpc/verify/README.md))

On one rank, on the CPU, in float64: loss and all gradients differ from the plain model's by
{difference}, relative.
"""


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x
        for layer in self.layers:
            h = h + nn.functional.gelu(layer(h))
        return nn.functional.mse_loss(h, y)


def graph_text(program: Program) -> str:
    lines = []
    for node in program.gm.graph.nodes:
        shape = program.info[node.name].shape if node.name in program.info else ""
        lines.append(f"{node.name:24} {node.op:14} {node.target!s:34} {shape}".rstrip())
    return "\n".join(lines)


def placement_text(placement: Placement) -> str:
    return "\n".join(f"{name:24} {chosen.output}" for name, chosen in placement.nodes.items())


def alternatives_text(sharding: Sharding) -> str:
    return "\n".join(
        f"{name:24} {NEXT.join(wanted(alternative) for alternative in found)}"
        for name, found in sharding.alternatives.items()
    )


def wanted(alternative: Alternative) -> str:
    operands = " ".join(str(label) for label in alternative.operands)
    return f"{operands} -> {alternative.output}" if operands else str(alternative.output)


def difference() -> str:
    """Returns how far loss and gradients are from the plain model's, relative, as a bound."""
    torch.manual_seed(0)
    plain, ours = Layers().double(), Layers().double()
    ours.load_state_dict(plain.state_dict())
    buckets = dcpc.Buckets(
        inputs={"x": "float64[batch, seq, 8]", "y": "float64[batch, seq, 8]"}, sizes=[{"seq": 64}]
    )
    compiled = dcpc.compile(ours, buckets, backend="eager")
    x, y = torch.randn(2, 3, 64, 8, dtype=torch.float64)
    losses = [model(x=x, y=y) for model in (compiled, plain)]
    for loss in losses:
        loss.backward()
    values = [
        [loss.detach(), *(p.grad for p in model.parameters())]
        for loss, model in zip(losses, (ours, plain), strict=True)
    ]
    worst = max(float((a - b).norm() / b.norm()) for a, b in zip(*values, strict=True))
    return "at most 1e-12" if worst <= 1e-12 else f"{worst:.0e}"


def page() -> str:
    torch.manual_seed(0)
    planned = dcpc.api.plan(
        Layers(), BUCKETS, world=2, memory=MEMORY, device="h200", backend="eager"
    )
    long = [*BUCKETS][-1]
    return TEXT.format(
        buckets=" and ".join(f"`{bucket}`" for bucket in BUCKETS),
        program=graph_text(planned.program),
        alternatives=alternatives_text(planned.runnable.traced.sharding),
        long=f"`{long}`",
        placement=placement_text(planned.placement(long)),
        forward=planned.source(long).split("\n\ndef backward")[0].strip(),
        report=planned.report(full=True).strip(),
        difference=difference(),
    )


def main() -> None:
    OUT.write_text(page())


if __name__ == "__main__":
    main()
