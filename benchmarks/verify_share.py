"""The share of a compile that its verification takes: GPT, Llama and STDiT at the demos' sizes.

python -m benchmarks.verify_share [--quick] [--json FILE]

Two ranks are planned for, of each model in a process of its own; "auto" then compares what
`dcpc.compile` would. A variant is compared when it is first built, which is not counted: nor is
building it. Seconds are those that the process computes (its only thread), so that what else runs
on the machine does not count.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import nn

import dcpc
from benchmarks.harness import Cell, parser, print_table, write_report
from dcpc.verify import Verifier
from examples.video_workload import DEMO as VIDEO
from examples.workload import DEMO, INPUTS, QUICK

# Of the video demo's clips: latent frames, rows and columns.
CLIPS = [
    {"frames": f, "height": h, "width": w}
    for h, w, frames in ((13, 31, (1, 5, 10, 15)), (17, 31, (1, 5, 10, 15)), (29, 53, (1, 5)))
    for f in frames
]


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=344, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=8192,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def _video_buckets() -> dcpc.Buckets:
    clips: list[Any] = [SimpleNamespace(**sizes, sizes=sizes) for sizes in CLIPS]
    return VIDEO.buckets(clips)


def cases(quick: bool) -> Iterator[tuple[str, nn.Module, dcpc.Buckets, int]]:
    """Yields name, model, buckets and the bytes of a rank."""
    torch.manual_seed(0)
    work = QUICK if quick else DEMO
    yield "gpt", work.make_model(), work.ladder, work.memory_bytes
    sizes = [{**b.sizes} for b in work.ladder][:: 3 if quick else 1]
    yield "llama", _llama(), dcpc.Buckets(inputs=INPUTS, sizes=sizes), work.memory_bytes
    if not quick:
        yield "stdit", VIDEO.make_model(), _video_buckets(), VIDEO.memory_bytes


def shares(quick: bool) -> Mapping[str, tuple[float, float]]:
    """Returns name -> seconds of tracing and planning, and of verification."""
    names = [name for name, *_ in cases(quick)]
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        return dict(zip(names, pool.map(share, names, [quick] * len(names)), strict=True))


def share(name: str, quick: bool) -> tuple[float, float]:
    """Returns the seconds of tracing and planning a model, and of its verification."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    model, buckets, memory_bytes = next(rest for n, *rest in cases(quick) if n == name)
    start_s = time.process_time()
    planned = dcpc.api.plan(model, buckets, world=2, memory=memory_bytes, backend="eager")
    planned_s = time.process_time()
    Verifier(model, buckets, planned, "auto").start(planned_s - start_s)
    return planned_s - start_s, time.process_time() - planned_s


def share_figures(found: Mapping[str, tuple[float, float]]) -> dict[str, Cell]:
    """Returns the share of each model, and the largest."""
    each = {f"verify_share_of_compile_{name}": v / (c + v) for name, (c, v) in found.items()}
    return {**each, "verify_share_of_compile": max(each.values())}


def main() -> None:
    """Prints the table and writes the figures."""
    args = parser("verify_share", "share of a compile that verification takes").parse_args()
    torch.set_num_threads(1)
    found = shares(args.quick)
    rows = [[name, c, v, v / (c + v)] for name, (c, v) in found.items()]
    print_table("seconds", ["model", "trace and plan", "verify", "share of both"], rows)
    write_report("verify_share", share_figures(found), args.json)


if __name__ == "__main__":
    main()
