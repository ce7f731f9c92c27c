"""Lists one rank's calls, from a partition's two graphs or from a schedule of a joint graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from dcpc.ir import Partition, Schedule


@dataclass(frozen=True, slots=True)
class RankRun:
    """Values and calls of one rank: forward, then backward.

    Attributes:
        primals: forward's placeholders.
        forward: calls of forward.
        outputs: outputs of forward, the loss first.
        saved: activations that forward saves for backward.
        given: backward's placeholders and the forward values they take.
        tangents: backward's placeholders for the gradients of the outputs it begins at.
        backward: calls of backward; a node of forward among them is recomputed.
        gradients: outputs of backward; None for a parameter without a gradient.
    """

    primals: Sequence[fx.Node]
    forward: Sequence[fx.Node]
    outputs: Sequence[fx.Node]
    saved: Sequence[fx.Node]
    given: Sequence[tuple[fx.Node, fx.Node]]
    tangents: Sequence[fx.Node]
    backward: Sequence[fx.Node]
    gradients: Sequence[fx.Node | None]

    @classmethod
    def of(cls, what: Partition | Schedule) -> RankRun:
        """Returns the run of a partition's graphs, or of a schedule."""
        if isinstance(what, Schedule):
            return cls(
                primals=what.primals,
                forward=what.forward,
                outputs=what.outputs,
                saved=what.saved,
                given=[(n, n) for n in (*what.saved, *what.backward_primals)],
                tangents=what.tangents,
                backward=what.backward,
                gradients=what.gradients,
            )
        forward, backward = what.forward.graph, what.backward.graph
        primals = {n.name: n for n in forward.nodes if n.op == "placeholder"}
        outputs = _outputs(forward)
        saved = outputs[what.returned :]
        # By their place: a call may have another name in forward than it had before it was cut off.
        kept = [*saved, *(primals[name] for name in what.backward_primals)]
        given = [n for n in backward.nodes if n.op == "placeholder"]
        taken, tangents = given[: len(kept)], given[len(kept) :]
        assert len(tangents) == len(what.begins), (
            f"backward takes {len(given)} values and gradients; forward gives {len(kept)} values "
            f"for it, and it begins at {len(what.begins)}"
        )
        return cls(
            primals=[*primals.values()],
            forward=_calls(forward),
            outputs=outputs[: what.returned],
            saved=saved,
            given=[*zip(taken, kept, strict=True)],
            tangents=tangents,
            backward=_calls(backward),
            gradients=_outputs(backward),
        )


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op not in ("placeholder", "output")]


def _outputs(graph: fx.Graph) -> list[Any]:
    outputs = graph.output_node().args[0]
    assert isinstance(outputs, list | tuple), f"the graph returns {outputs}; expected a list"
    return list(outputs)
