"""What one rank runs, of a partition's two graphs or of a schedule of a joint graph's nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from dcpc.ir import Partition, Schedule


@dataclass(frozen=True, slots=True)
class RankRun:
    """What one rank runs: calls of forward, then calls of backward.

    Attributes:
        primals: forward's placeholders.
        forward: its calls.
        loss: what it returns first.
        saved: what it returns for backward.
        given: backward's placeholders and the forward values they take.
        tangent: backward's placeholder for the loss's gradient.
        backward: its calls; a node of forward among them is made again.
        gradients: what it returns; None for a parameter without a gradient.
    """

    primals: Sequence[fx.Node]
    forward: Sequence[fx.Node]
    loss: fx.Node
    saved: Sequence[fx.Node]
    given: Sequence[tuple[fx.Node, fx.Node]]
    tangent: fx.Node
    backward: Sequence[fx.Node]
    gradients: Sequence[fx.Node | None]

    @classmethod
    def of(cls, what: Partition | Schedule) -> RankRun:
        """Returns what the graphs of a partition run, or what a schedule says."""
        if isinstance(what, Schedule):
            return cls(
                primals=what.primals,
                forward=what.forward,
                loss=what.loss,
                saved=what.saved,
                given=[(n, n) for n in (*what.saved, *what.backward_primals)],
                tangent=what.tangent,
                backward=what.backward,
                gradients=what.gradients,
            )
        forward, backward = what.forward.graph, what.backward.graph
        by_name = {n.name: n for n in forward.nodes}
        names = [*what.saved, *what.backward_primals]
        *taken, tangent = (n for n in backward.nodes if n.op == "placeholder")
        assert len(taken) == len(names), (
            f"backward takes {len(taken)} values and the loss' gradient; forward gives {len(names)}"
        )
        loss, *saved = _outputs(forward)
        return cls(
            primals=[n for n in forward.nodes if n.op == "placeholder"],
            forward=_calls(forward),
            loss=loss,
            saved=saved,
            given=[(n, by_name[name]) for n, name in zip(taken, names, strict=True)],
            tangent=tangent,
            backward=_calls(backward),
            gradients=_outputs(backward),
        )


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op not in ("placeholder", "output")]


def _outputs(graph: fx.Graph) -> list[Any]:
    outputs = graph.output_node().args[0]
    assert isinstance(outputs, list | tuple), f"the graph returns {outputs}; expected a list"
    return list(outputs)
