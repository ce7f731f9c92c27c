"""Seconds of a trace against torch's own: `python -m benchmarks.trace [--quick] [--json FILE]`.

Models of the zoo (two layers each), a deep Llama and STDiT3-XL/2 are traced by dcpc as it is, and
once more with its fake tensors left to torch and the graph made functional by torch
(`ExportedProgram.run_decompositions`). The two take turns; processor seconds, as tracing is one
thread's work. `graphs_differ` counts models whose two graphs are not the same, node for node.

--quick has a language model, a video model and a shallow Llama.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from time import process_time
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn
from transformers import LlamaConfig, LlamaForCausalLM

import dcpc
from benchmarks import harness
from benchmarks.stdit_costs import INPUTS
from dcpc.ir import Program
from dcpc.trace import trace
from dcpc.trace.capture import capture
from dcpc.trace.capture.order import staying
from models.stdit import XL, RectifiedFlow, STDiT
from tests.zoo.models import NAMED

QUICK = ("transformers GPT-2", "diffusers CogVideoX", "Llama, 4 layers")


@dataclass(frozen=True, slots=True)
class Traced:
    """One model, traced both ways.

    Attributes:
        name: of the model.
        nodes: of the graph.
        ours_s: processor seconds.
        torchs_s: the same, by torch alone.
        alike: whether the graphs are the same.
    """

    name: str
    nodes: int
    ours_s: float
    torchs_s: float
    alike: bool

    @property
    def ratio(self) -> float:
        """Our seconds over torch's."""
        return self.ours_s / self.torchs_s


def said(program: Program) -> list[tuple[str, ...]]:
    """Returns all that a graph says but for names: calls, arguments, shapes, dtypes.

    Which tensor a size is read of makes no difference, and so where among what depends on no
    parameter that tensor is made; nor do -1 in a shape that is known and the number that tells one
    call for random numbers from another.
    """
    every = [n for n in program.gm.graph.nodes if n.name not in program.scalars]
    nodes = sorted((n for n in every if n.op == "placeholder"), key=lambda n: n.name)
    stays = staying(program.gm.graph, program.parameters)
    for node in every:
        if node in stays:
            nodes += _made_for(node, program, {*nodes})
    names: dict[fx.Node, Any] = {node: f"#{i}" for i, node in enumerate(nodes)}
    scalars = (n for n in program.gm.graph.nodes if n.name in program.scalars)
    names |= {n: str(program.scalars[n.name]) for n in scalars}
    return [
        (
            node.op, "" if node.op == "output" else str(node.target),
            *map(str, fx.map_arg((_telling(node), dict(node.kwargs)), lambda n: names[n])),
            str(program.info.get(node.name)),
        )
        for node in nodes
    ]  # fmt: skip


def _made_for(node: fx.Node, program: Program, known: set[fx.Node]) -> list[fx.Node]:
    """Returns what a call reads and nobody before it did, operands first, and the call."""
    found: list[fx.Node] = []
    for n in node.all_input_nodes:
        if n.name not in program.scalars and n not in known:
            found += _made_for(n, program, {*known, *found})
    return [*dict.fromkeys(found), *([] if node in known else [node])]


def _telling(node: fx.Node) -> tuple[Any, ...]:
    if node.target is torch.ops.aten.reshape.default:
        return node.args[:1]
    if str(node.target) in ("dcpc.uniform.default", "dcpc.normal.default"):
        return node.args[:1]
    return node.args


@contextmanager
def by_torch() -> Iterator[None]:
    """In its block traces are made by torch alone."""
    with (
        patch.object(capture, "telling", nullcontext),
        patch.object(capture, "functional", lambda exported: exported.run_decompositions({})),
    ):
        yield


def both(name: str, make: Callable[[], nn.Module], buckets: dcpc.Buckets, turns: int) -> Traced:
    """Returns one model traced both ways, the median of some turns."""
    model = make()
    seconds: tuple[list[float], list[float]] = ([], [])
    programs: list[Program] = []
    for turn in range(2 * turns):
        start_s = process_time()
        with by_torch() if turn % 2 else nullcontext():
            program = trace(model, buckets)
        seconds[turn % 2].append(process_time() - start_s)
        programs.append(program)
    ours, torchs = programs[:2]
    return Traced(
        name=name, nodes=len(ours.gm.graph.nodes), ours_s=statistics.median(seconds[0]),
        torchs_s=statistics.median(seconds[1]), alike=said(ours) == said(torchs),
    )  # fmt: skip


def llama(layers: int) -> nn.Module:
    """Returns a Llama on the meta device: a trace needs no weights."""
    config = LlamaConfig(
        vocab_size=32_000, hidden_size=512, intermediate_size=1_024, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def stdit(pairs: int) -> nn.Module:
    """Returns STDiT3-XL/2 with some pairs of blocks, on the meta device, in bfloat16."""
    with torch.device("meta"):
        return RectifiedFlow(STDiT(replace(XL, depth=pairs))).to(torch.bfloat16)


def subjects(quick: bool) -> Mapping[str, tuple[Callable[[], nn.Module], dcpc.Buckets]]:
    """Returns name -> what makes a model, and its buckets."""
    inputs = {n: s.format(**asdict(XL), dtype="bfloat16") for n, s in INPUTS.items()}
    sizes = [{"frames": f, "tokens": t} for f in (2, 30) for t in (144, 3_600)]
    videos = dcpc.Buckets(inputs, sizes)
    text = {n: "int64[batch, seq]" for n in ("input_ids", "labels")}
    texts = dcpc.Buckets(text, [{"seq": 128}, {"seq": 4_096}])
    found: dict[str, tuple[Callable[[], nn.Module], dcpc.Buckets]] = {
        name: (model.make, model.buckets) for name, model in NAMED.items()
    }
    for layers in (4, 16):
        found[f"Llama, {layers} layers"] = (lambda layers=layers: llama(layers)), texts
    found["STDiT3-XL/2, 4 pairs of blocks"] = (lambda: stdit(4)), videos
    return {n: s for n, s in found.items() if not quick or n in QUICK}


def main() -> None:
    """Runs the benchmark."""
    args = harness.parser("trace", __doc__.partition("\n")[0]).parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    turns = 1 if args.quick else 2
    found = [both(name, *subject, turns) for name, subject in subjects(args.quick).items()]
    header = ("model", "nodes", "dcpc s", "torch s", "ratio", "same graph")
    rows = [(t.name, t.nodes, t.ours_s, t.torchs_s, t.ratio, str(t.alike)) for t in found]
    harness.print_table("processor seconds of a trace", header, rows, digits=2)
    figures: dict[str, harness.Cell] = {
        "models": len(found), "median_ratio": statistics.median(t.ratio for t in found),
        "worst_ratio": max(t.ratio for t in found),
        "graphs_differ": sum(not t.alike for t in found), "trace_s": sum(t.ours_s for t in found),
        "torch_trace_s": sum(t.torchs_s for t in found),
    }  # fmt: skip
    harness.write_report("trace", figures, args.json)


if __name__ == "__main__":
    main()
