"""The plans of some models on two devices: degree, micro-batch, split of attention and seconds.

`--json FILE` writes them, `--against FILE` says what is other than in such a file, written before a
change of the placement. Seconds are those of the report: predicted, of one micro-batch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import Cell, parser, print_table, timed
from dcpc.api import plan
from dcpc.buckets import Buckets
from dcpc.plan.planning import Planned
from models.gpt import GPT, GPTConfig
from models.stdit import RectifiedFlow, STDiT, STDiTConfig, input_specs

TOKENS = {"input_ids": "int64[batch, seq]", "labels": "int64[batch, seq]"}
LENGTHS = (2048, 8192, 32768, 131072)
CLIPS = ((4, 18, 32), (16, 30, 53), (30, 45, 80), (60, 60, 106))
WORLDS = (2, 8)
# A rank's memory, so that short samples fit many times and the longest need a group.
MEMORY = {
    ("gpt", "h200"): 20e9, ("gpt", "cpu"): 20e9,
    ("llama", "h200"): 40e9, ("llama", "cpu"): 40e9,
    ("stdit", "h200"): 40e9, ("stdit", "cpu"): 40e9,
}  # fmt: skip


def gpt() -> tuple[nn.Module, Buckets]:
    """Returns a GPT with grouped heads, and its buckets."""
    config = GPTConfig(vocab_size=8192, dim=1024, n_layers=8, n_heads=16, n_kv_heads=4)
    return GPT(config).to(torch.bfloat16), Buckets(TOKENS, [{"seq": n} for n in LENGTHS])


def llama() -> tuple[nn.Module, Buckets]:
    """Returns a Llama of transformers."""
    config = LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=6,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=LENGTHS[-1],
    )  # fmt: skip
    sizes = [{"seq": n} for n in LENGTHS]
    return nn.Module.to(LlamaForCausalLM(config), torch.bfloat16), Buckets(TOKENS, sizes)


def stdit() -> tuple[nn.Module, Buckets]:
    """Returns an STDiT3 of XL/2's width with six blocks."""
    config = STDiTConfig(depth=3)
    sizes = [{"frames": t, "height": h, "width": w} for t, h, w in CLIPS]
    model = RectifiedFlow(STDiT(config)).to(torch.bfloat16)
    return model, Buckets(input_specs(config, "bfloat16"), sizes)


MODELS: dict[str, Callable[[], tuple[nn.Module, Buckets]]] = {
    "gpt": gpt, "llama": llama, "stdit": stdit,
}  # fmt: skip


def found(planned: Planned) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields bucket -> its plan and the predicted seconds of every row of its table."""
    lines = (re.match(r"attention of (\{.*\}), sp \d+: (.*) \(", x) for x in planned.attention)
    ways = {m[1]: m[2] for m in lines if m is not None}
    for bucket, chosen in planned.plans.items():
        rows = planned.tables[bucket]
        settings = {f"{r.sp} x {r.micro_batch}": r.seconds_s for r in rows if r.fits}
        yield (
            str(bucket),
            {
                "sp": chosen.sp, "micro": chosen.micro_batch,
                "recompute": f"{chosen.menu_step}/{chosen.steps}",
                "attention": ways.get(str(bucket), ""),
                "rank_s": chosen.seconds_s * chosen.sp / chosen.micro_batch, "rows": settings,
            },
        )  # fmt: skip


def main() -> None:
    p = parser("plans", __doc__ or "")
    p.add_argument("--against", type=Path, metavar="FILE", help="plans of before")
    args = p.parse_args()
    before = {} if args.against is None else json.loads(args.against.read_text())
    plans: dict[str, dict[str, Any]] = {}
    for name, make in MODELS.items():
        with torch.device("meta"):
            model, buckets = make()
        for device in ("h200", "cpu"):
            for world in WORLDS[:1] if args.quick else WORLDS:
                with timed() as watch:
                    planned = plan(
                        model, buckets, world=world, device=device, backend="eager",
                        memory=int(MEMORY[name, device]),
                    )  # fmt: skip
                print(f"{name} on {world} of {device}: {watch.elapsed_s:.1f} s", flush=True)
                for bucket, row in found(planned):
                    plans[f"{name}, {device}, {world}, {bucket}"] = row
                if args.json is not None:
                    args.json.write_text(json.dumps(plans, indent=1) + "\n")
    show(plans, before)


def show(plans: dict[str, dict[str, Any]], before: dict[str, dict[str, Any]]) -> None:
    """Prints the plans, and how they are other than before."""
    rows: list[list[Cell]] = []
    for key, now in plans.items():
        old = before.get(key, now)
        keys = "sp", "micro", "recompute", "attention"
        shown: list[Cell] = [
            str(now[k]) if now[k] == old[k] else f"{old[k]} -> {now[k]}" for k in keys
        ]
        same = [now["rows"][r] / old["rows"][r] for r in now["rows"] if r in old["rows"]]
        ratio = now["rank_s"] / old["rank_s"]
        rows.append([key, *shown, 1e3 * now["rank_s"], ratio, min(same), max(same)])
    header = ["bucket", "sp", "micro-batch", "recompute", "attention", "ms a sample x ranks"]
    header += ["over before", "least row", "worst row"]
    print_table("plans", header, rows, digits=4)


if __name__ == "__main__":
    main()
