"""Seconds of planning with joint graphs from pieces against `make_fx` of each whole graph.

`python -m benchmarks.joint_tracing [--quick] [--json FILE]`. The ways take turns; processor seconds
of planning alone, after the trace. "Told" is `make_fx` with fake tensors that know the results of
common calls (`dcpc/fx/fakes/`). That the graphs are the same is a test (`tests/benchmarks/`).

--quick has a GPT and T5, one turn each.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from time import process_time
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import harness
from benchmarks.joint_whole import by_make_fx
from benchmarks.plans import LENGTHS, TOKENS
from benchmarks.stdit_costs import priced_of
from benchmarks.video import shapes
from benchmarks.zoo_models import NAMED
from dcpc.api import plans, search
from dcpc.buckets import Buckets
from dcpc.codegen import Library, Tracer
from dcpc.codegen.joint.joint import Joint
from dcpc.codegen.lower.lower import Lowered
from dcpc.plan.options import degrees
from dcpc.plan.planning import PlanRequest
from models.gpt import GPT, GPTConfig
from models.stdit import XL

QUICK = ("GPT, 24 layers", "transformers T5")

WAYS: Mapping[str, Callable[[], AbstractContextManager[None]]] = {
    "pieces": nullcontext,
    "told": lambda: by_make_fx(told=True),
    "make_fx": by_make_fx,
}


@dataclass(slots=True)
class Clock:
    """Processor seconds of a planning.

    Attributes:
        plan_s: of all.
        joint_s: of joint graphs, which are part of it.
        graphs: joint graphs that were made.
    """

    plan_s: float = 0.0
    joint_s: float = 0.0
    graphs: int = 0


@contextmanager
def clocked() -> Iterator[Clock]:
    """Yields what is spent on planning in its block, traces left out."""
    clock, planned, made = Clock(), search.plan_buckets, Tracer.joint

    def plan_buckets(*args: Any, **kwargs: Any) -> Any:
        start_s = process_time()
        found = planned(*args, **kwargs)
        clock.plan_s += process_time() - start_s
        return found

    def joint(tracer: Tracer, lowered: Lowered) -> Joint:
        start_s = process_time()
        found = made(tracer, lowered)
        clock.joint_s += process_time() - start_s
        clock.graphs += 1
        return found

    with patch.object(search, "plan_buckets", plan_buckets), patch.object(Tracer, "joint", joint):
        yield clock


def planned(make: Callable[[], nn.Module], buckets: Buckets, *, meta: bool) -> None:
    """Plans a model for 8 H200s."""
    with torch.device("meta") if meta else nullcontext():
        model = make()
    plans.plan(model, buckets, world=8, device="h200", backend="eager", memory=int(20e9))


def gpt() -> nn.Module:
    """Returns a GPT of 24 blocks with grouped heads."""
    config = GPTConfig(vocab_size=8192, dim=1024, n_layers=24, n_heads=16, n_kv_heads=4)
    return GPT(config).to(torch.bfloat16)


def llama() -> nn.Module:
    """Returns a Llama of 24 blocks of transformers."""
    config = LlamaConfig(
        vocab_size=32_000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=24,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=LENGTHS[-1],
    )  # fmt: skip
    return nn.Module.to(LlamaForCausalLM(config), torch.bfloat16)


def stdit() -> None:
    """Plans STDiT3-XL/2 on the 25 video buckets for 8 ranks, as `benchmarks.recompute` does."""
    libraries: dict[str, Library] = {}
    videos, images = (priced_of(XL, image, libraries=libraries) for image in (False, True))
    buckets = {s.bucket: images if s.frames == 1 else videos for s in shapes()}
    search.plan_buckets(buckets, PlanRequest(degrees("auto", 8), "auto", int(141e9), int(20e9), 8))


def subjects() -> dict[str, Callable[[], None]]:
    """Returns name -> what traces and plans a model."""
    texts = Buckets(TOKENS, [{"seq": n} for n in LENGTHS])
    found: dict[str, Callable[[], None]] = {
        "GPT, 24 layers": lambda: planned(gpt, texts, meta=True),
        "Llama, 24 layers": lambda: planned(llama, texts, meta=True),
    }
    for name in ("transformers T5", "diffusers PixArt", "diffusers CogVideoX"):
        model = NAMED[name]
        found[name] = partial(planned, model.make, model.buckets, meta=False)
    found["STDiT3-XL/2, 25 buckets"] = stdit
    return found


def measured(plan: Callable[[], None], turns: int) -> dict[str, Clock]:
    """Returns way -> its fastest turn; the ways take turns."""
    found: dict[str, list[Clock]] = {way: [] for way in WAYS}
    for _ in range(turns):
        for way, block in WAYS.items():
            with block(), clocked() as clock:
                plan()
            found[way].append(clock)
    return {way: min(clocks, key=lambda c: c.plan_s) for way, clocks in found.items()}


def main() -> None:
    """Runs the benchmark."""
    args = harness.parser("joint_tracing", __doc__.partition("\n")[0]).parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows: list[list[harness.Cell]] = []
    figures: dict[str, harness.Cell] = {}
    for name, plan in subjects().items():
        if args.quick and name not in QUICK:
            continue
        by_way = measured(plan, 1 if args.quick else 3)
        rows.append([name, by_way["pieces"].graphs])
        for way, clock in by_way.items():
            rows[-1] += [clock.plan_s, clock.joint_s]
            short = name.split(",")[0].split()[-1].lower().replace("/", "")
            figures[f"{short}_{way}_plan_s"] = clock.plan_s
            figures[f"{short}_{way}_joint_s"] = clock.joint_s
    header = ["model", "graphs", *(f"{way} {part} s" for way in WAYS for part in ("plan", "joint"))]
    harness.print_table("processor seconds of planning", header, rows, digits=2)
    harness.write_report("joint_tracing", figures, args.json)


if __name__ == "__main__":
    main()
