"""Lists one rank's calls, from a partition's two graphs or from a schedule of a joint graph."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from torch import fx

from dcpc.ir import Partition, Schedule


@dataclass(frozen=True, slots=True)
class RankRun(Schedule):
    """Values and calls of one rank: those of a schedule, or of a partition's two graphs.

    Attributes:
        given: backward's placeholders and the forward values they take.
    """

    given: tuple[tuple[fx.Node, fx.Node], ...]

    @classmethod
    def of(cls, what: Partition | Schedule) -> RankRun:
        """Returns the run of a partition's graphs, or of a schedule."""
        if isinstance(what, Schedule):
            kept = (*what.saved, *what.backward_primals)
            own = {f.name: getattr(what, f.name) for f in fields(Schedule)}
            return cls(**own, given=tuple(zip(kept, kept, strict=True)))
        forward, backward = what.forward.graph, what.backward.graph
        primals = {n.name: n for n in forward.nodes if n.op == "placeholder"}
        outputs = _outputs(forward)
        saved = outputs[what.returned :]
        # By their place: a call may have another name in forward than it had before it was cut off.
        again = tuple(primals[name] for name in what.backward_primals)
        kept = (*saved, *again)
        given = tuple(n for n in backward.nodes if n.op == "placeholder")
        taken, tangents = given[: len(kept)], given[len(kept) :]
        assert len(tangents) == len(what.begins), (
            f"backward takes {len(given)} values and gradients; forward gives {len(kept)} values "
            f"for it, and it begins at {len(what.begins)}"
        )
        return cls(
            primals=tuple(primals.values()),
            forward=_calls(forward),
            outputs=outputs[: what.returned],
            begins=what.begins,
            saved=saved,
            backward_primals=again,
            tangents=tangents,
            backward=_calls(backward),
            gradients=_outputs(backward),
            given=tuple(zip(taken, kept, strict=True)),
        )


def _calls(graph: fx.Graph) -> tuple[fx.Node, ...]:
    return tuple(n for n in graph.nodes if n.op not in ("placeholder", "output"))


def _outputs(graph: fx.Graph) -> tuple[Any, ...]:
    outputs = graph.output_node().args[0]
    assert isinstance(outputs, list | tuple), f"the graph returns {outputs}; expected a list"
    return tuple(outputs)
