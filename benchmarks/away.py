"""Saved values that leave the device: bits and peaks here, seconds predicted of an 8B decoder.

The decoder has the shape of Llama 3 8B in bfloat16; a rank of eight holds its rows of parameters
(`parameters="rounds"`), on an H200 of which a plan may use 60 GB. Its seconds are predicted, by
recompute alone and with the host's memory.

Bits are those of loss and gradients in float64, with values that leave and without, of decoders at
several depths, lengths, recompute and places. Peaks are those of decoders that recompute nothing
within shares of the memory that they need whole, by the allocator's events.
"""

from __future__ import annotations

import gc
import itertools
from typing import Any

import torch

from benchmarks.harness import Cell, parser, print_table, write_report
from benchmarks.one_length import INPUTS, Subject
from dcpc.api import plan
from dcpc.buckets import Buckets
from examples.allocator import measured_peak_bytes
from models.gpt import GPT, GPTConfig, llama_8b

VOCABULARY = 256


def decoder(layers: int, dim: int) -> GPT:
    """Returns a decoder; those of one size have equal parameters."""
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=VOCABULARY, dim=dim, n_layers=layers, n_heads=4))


def subject(model: torch.nn.Module, seq: int, samples: int = 1, **options: Any) -> Subject:
    """Returns a decoder compiled for one length."""
    draw = torch.Generator().manual_seed(seq)
    ids = torch.randint(0, VOCABULARY, (samples, seq), generator=draw)
    return Subject.of(model, ids, ids, **{"tile": "none", **options})


def bits(quick: bool) -> dict[str, Cell]:
    """Returns how many runs have the bits of the same plan whose values stay."""
    places: list[dict[str, str]] = [{"host": "1GB"}, {"disk": "/tmp:1GB"}]
    depths = (2,) if quick else (1, 3, 6)
    cases = itertools.product(depths, ("none", "all"), places, ((1, 96), (3, 33)))
    equal, count = 0, 0
    for layers, recompute, place, (samples, seq) in cases:
        runs = [
            subject(decoder(layers, 32).double(), seq, samples, recompute=recompute, **more).run()
            for more in ({}, {**place, "away": "all"})
        ]
        equal += all(map(torch.equal, *runs))
        count += 1
    return {"bit_equal": equal, "bit_cases": count}


def capped(quick: bool) -> dict[str, Cell]:
    """Returns the largest error of peaks, and the share of the whole peak within which they fit."""
    errors, shares, over = [], [], 0
    for layers, share in itertools.product((2,) if quick else (2, 5, 8), (0.7, 0.45, 0.35)):
        whole = subject(decoder(layers, 64), 256, 2, recompute="none")
        memory = whole.compiled.planned.request.resident_bytes + share * whole.row.peak_bytes
        one = subject(decoder(layers, 64), 256, 2, recompute="none", memory=memory, host="1GB")
        one.run()
        one.model.zero_grad()
        gc.collect()
        peak = measured_peak_bytes(lambda one=one: one.compiled(**one.given).backward())
        errors.append(abs(peak / one.row.peak_bytes - 1))
        shares.append(peak / whole.row.peak_bytes)
        over += peak > share * whole.row.peak_bytes + 64
    return {"peak_error": max(errors), "least_peak_over_whole": min(shares), "over_cap": over}


def predicted(seq: int) -> dict[str, Cell]:
    """Returns the 8B decoder's seconds by recompute alone, and with the host's memory."""
    buckets = Buckets(INPUTS, [{"seq": seq}])
    found: dict[str, Cell] = {"tokens": seq}
    for name, host in (("recompute", None), ("host", "1600GB")):
        (row,) = plan(
            llama_8b(), buckets, memory="60GB", world=8, sp=1, parameters="rounds", device="h200",
            backend="eager", host=host,
        ).plans.values()  # fmt: skip
        found |= {f"{name}_s": row.seconds_s, f"{name}_away_gb": row.away_bytes / 1e9}
    return found


def main() -> None:
    """Prints the tables."""
    args = parser("away", str(__doc__).partition("\n")[0]).parse_args()
    torch.set_num_threads(1)
    rows = [] if args.quick else [predicted(seq) for seq in (2_048, 32_768, 131_072)]
    if rows:
        print_table("An 8B decoder, predicted", [*rows[0]], [[*row.values()] for row in rows])
    here = bits(args.quick) | capped(args.quick)
    print_table("Measured here", [*here], [[*here.values()]])
    figures: dict[str, Cell] = {}
    for row in rows:
        name = f"predicted_8b_{row['tokens'] // 1024}k_over_recompute"  # type: ignore[operator]
        figures[name] = row["host_s"] / row["recompute_s"]  # type: ignore[operator]
    write_report("away", {**figures, **here}, args.json)


if __name__ == "__main__":
    main()
