"""Saved values that leave the device: bits and peaks here, seconds predicted of an 8B decoder.

The decoder has the shape of Llama 3 8B in bfloat16; a rank of eight holds its rows of parameters
(`parameters="rounds"`), on an H200 of which a plan may use 60 GB. Its seconds are predicted, by
recompute alone and with the host's memory.

Of that plan and of smaller decoders at many lengths and memories, none may be slower than by
recompute alone or with all leaving that can. `away_bounds.py` compares plans with the least bytes
and seconds of any.

Bits are those of loss and gradients in float64, with values that leave and without, of decoders at
several depths, lengths, recompute and places. Peaks are those of decoders within shares of the
memory that they need whole, by the allocator's events; some run with malloc capped at that
(RLIMIT_DATA), in which they must fail if nothing leaves.
"""

from __future__ import annotations

import gc
import itertools
import math
import random
from functools import partial
from typing import Any

import torch

from benchmarks.away_bounds import bounds
from benchmarks.away_race import race
from benchmarks.harness import Cell, parser, print_table, write_report
from benchmarks.one_length import INPUTS, Subject
from dcpc.api import plan
from dcpc.buckets import BATCH, Buckets
from dcpc.errors import PlanError
from dcpc.ir.thresholds import AWAY_GAIN
from dcpc.runtime.step.shortage import is_out_of_memory
from examples.allocator import measured_peak_bytes
from examples.one_small_card import BESIDE_BYTES, at_most
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
    """Returns the largest error of peaks, the least share that fits, and how many are over it."""
    draw, errors, shares, over, cases = random.Random(0), [], [], 0, 0
    while cases < (4 if quick else 60):
        layers, dim = draw.randint(1, 4), draw.choice((32, 64))
        seq, samples, share = draw.randint(32, 300), draw.randint(1, 3), draw.uniform(0.35, 0.9)
        recompute = draw.choice(("auto", "none"))
        whole = subject(decoder(layers, dim), seq, samples, recompute="none")
        memory = whole.compiled.planned.request.resident_bytes + share * whole.row.peak_bytes
        given = {"recompute": recompute, "memory": memory, "host": "1GB"}
        try:
            one = subject(decoder(layers, dim), seq, samples, **given)
        except PlanError:
            continue
        one.run()
        one.model.zero_grad()
        gc.collect()
        peak = measured_peak_bytes(partial(_call, one))
        errors.append(abs(peak / one.row.peak_bytes - 1))
        shares.append(peak / whole.row.peak_bytes)
        over += peak > share * whole.row.peak_bytes
        cases += 1
    return {"cap_cases": cases, "peak_error": max(errors), "least_peak_over_whole": min(shares),
            "over_cap": over}  # fmt: skip


def enforced(cases: int) -> dict[str, Cell]:
    """Returns how many of some runs malloc let through at half of the peak, and without `host=`."""
    ran, whole_ran = 0, 0
    for samples in range(4, 4 + cases):
        whole = subject(decoder(4, 128), 1024, samples, recompute="none")
        memory = whole.compiled.planned.request.resident_bytes + 0.5 * whole.row.peak_bytes
        one = subject(decoder(4, 128), 1024, samples, recompute="none", memory=memory, host="4GB")
        one.run()  # gradients and graphs are there; the whole one's heap would stay
        with at_most(int(0.5 * whole.row.peak_bytes) + BESIDE_BYTES):
            ran += _runs(one)
            whole_ran += _runs(whole)
    return {"under_rlimit": ran, "rlimit_cases": cases, "under_rlimit_whole": whole_ran}


def _call(one: Subject) -> None:
    one.compiled(**one.given).backward()


def _runs(one: Subject) -> bool:
    try:
        _call(one)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


def worse(quick: bool) -> dict[str, Cell]:
    """Returns how many predicted plans are slower than recompute or leaving alone.

    By more than the gain from which on values leave.
    """
    count, slower = 0, 0
    for seq in (4_096,) if quick else (1_024, 4_096, 16_384, 65_536):
        buckets = Buckets(INPUTS, [{"seq": seq, BATCH: 1}])
        with torch.device("meta"):
            model = GPT(GPTConfig(vocab_size=96, dim=1024, n_layers=4, n_heads=8)).bfloat16()
        given: dict[str, Any] = {"device": "h200", "backend": "eager", "tile": "none"}
        free = plan(model, buckets, memory=1e13, recompute="none", **given)
        (whole,) = free.plans.values()
        for share in (0.6,) if quick else (0.8, 0.6, 0.45):
            memory = int(free.request.resident_bytes + share * whole.peak_bytes)
            both, *alone = (
                _seconds(model, buckets, memory=memory, **more, **given)
                for more in ({"host": "1TB"}, {}, {"host": "1TB", "recompute": "none"})
            )
            slower += both * (1 - AWAY_GAIN) > min(alone)
            count += 1
    return {"worse_than_either": slower, "worse_cases": count}


def _seconds(model: GPT, buckets: Buckets, **given: Any) -> float:
    try:
        (row,) = plan(model, buckets, **given).plans.values()
    except PlanError:
        return math.inf
    return float(row.seconds_s)


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
    here = bits(args.quick) | capped(args.quick) | enforced(1 if args.quick else 4)
    here |= worse(args.quick) | bounds(args.quick, decoder)
    raced = partial(subject, decoder(2 if args.quick else 6, 256), 256 if args.quick else 512, 2)
    here |= race(2 if args.quick else 7, raced)
    print_table("Measured here", [*here], [[*here.values()]])
    figures: dict[str, Cell] = {}
    for row in rows:
        name = f"predicted_8b_{row['tokens'] // 1024}k_over_recompute"  # type: ignore[operator]
        figures[name] = row["host_s"] / row["recompute_s"]  # type: ignore[operator]
    write_report("away", {**figures, **here}, args.json)


if __name__ == "__main__":
    main()
