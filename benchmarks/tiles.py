"""Logits a few rows at a time: peaks of an 8B decoder predicted, peaks and seconds measured here.

The decoder has the shape of Llama 3 8B in bfloat16 (`models.gpt:llama_8b`); a rank of eight holds
its rows of the parameters (`parameters="rounds"`), and everything is recomputed. Its predicted peak
is without the parameters' rows, for an H100. The program is whole, or the first of `TILES` below
the aim.

What is measured is a decoder of vocabulary 32,000 at 4,096 tokens in float32 on one thread, the
layers recomputed in both: peaks by the allocator's events, processor seconds of forward and
backward as medians of turns. Errors are those of the loss and of each gradient in float64, of a
smaller model, with tiles and without.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch

from benchmarks.harness import Cell, parser, print_table, write_report
from benchmarks.one_length import INPUTS, Subject
from dcpc.api import plan
from dcpc.buckets import BATCH, Buckets
from dcpc.plan.tiling import TILES, tiled
from examples.allocator import measured_peak_bytes
from models.gpt import GPT, GPTConfig, llama_8b

AIMS_GB = {32_768: 16.0, 131_072: 50.0}
VOCABULARY, MOST, TURNS = 32_000, 256, 3


def predicted(seq: int, aim_gb: float) -> dict[str, Cell]:
    """Returns the 8B decoder's peak in GB and seconds, whole and in tiles."""
    buckets = Buckets(INPUTS, [{"seq": seq}])
    whole = plan(
        llama_8b(), buckets, memory=1e13, world=8, sp=1, parameters="rounds", device="h100",
        backend="eager", recompute="all", tile="none",
    ).runnable  # fmt: skip
    found: dict[str, Cell] = {}
    for name, runnable in (("whole", whole), *((str(t), tiled(whole, *t)) for t in TILES)):
        assert runnable is not None, "a decoder has logits"
        sizes = {"seq": seq, BATCH: 1}
        study = runnable.priced.at(runnable.priced.placement(sizes, 1))
        cost = study.predict(study.steps, sizes)
        found = {**found, "peak_gb": cost.peak_bytes / 1e9, "seconds_s": cost.seconds_s}
        if name == "whole":
            found |= {"whole_gb": cost.peak_bytes / 1e9, "whole_s": cost.seconds_s}
        elif cost.peak_bytes <= aim_gb * 1e9:
            return {**found, "tiles": name}
    return found


def subject(config: dict[str, Any], seq: int, dtype: torch.dtype, tile: int | str) -> Subject:
    """Returns a decoder with these tiles; decoders of one config have equal parameters and data."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=VOCABULARY, n_heads=8, n_kv_heads=8, **config)).to(dtype)
    ids, labels = torch.randint(0, VOCABULARY, (2, 1, seq))
    return Subject.of(model, ids, labels, recompute="all", tile=tile)


def measured(layers: int, seq: int) -> dict[str, Cell]:
    """Returns peaks and seconds with tiles as a share of those without, and the peaks' error."""
    config = {"dim": 512, "n_layers": layers, "hidden": 1408}
    each = [subject(config, seq, torch.float32, tile) for tile in ("none", MOST)]
    for one in each:
        one.run()
    peaks = [measured_peak_bytes(one.run) for one in each]
    seconds: list[list[float]] = [[], []]
    for _ in range(TURNS):
        for times, one in zip(seconds, each, strict=True):
            start_s = time.process_time()
            one.run()
            times.append(time.process_time() - start_s)
    errors = [abs(p / one.row.peak_bytes - 1) for p, one in zip(peaks, each, strict=True)]
    return {
        "measured_peak_over_whole": peaks[1] / peaks[0],
        "seconds_over_whole": median(seconds[1]) / median(seconds[0]),
        "peak_error": max(errors),
        "whole_peak_mb": peaks[0] / 1e6,
        "whole_s": median(seconds[0]),
    }


def worst_error() -> float:
    """Returns the worst relative error of the loss and of each gradient, in float64."""
    config = {"dim": 64, "n_layers": 2, "hidden": 128}
    whole, tiles = (subject(config, 192, torch.float64, t).run() for t in ("none", 50))
    pairs = zip(whole, tiles, strict=True)
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)


def main() -> None:
    """Prints both tables."""
    args = parser("tiles", str(__doc__).partition("\n")[0]).parse_args()
    torch.set_num_threads(1)
    big = {seq: predicted(seq, aim) for seq, aim in AIMS_GB.items() if not args.quick or seq < 1e5}
    header = ["tokens", "tiles", "peak, GB", "whole, GB", "seconds over whole"]
    print_table("An 8B decoder, predicted", header, [
        [seq, f["tiles"], f["peak_gb"], f["whole_gb"], f["seconds_s"] / f["whole_s"]]  # type: ignore[operator]
        for seq, f in big.items()
    ])  # fmt: skip
    here = {"worst_relative_error": worst_error()}
    here |= measured(2, 1024) if args.quick else measured(12, 4096)
    print_table("Measured here", [*here], [[*here.values()]])
    peaks = {f"predicted_peak_8b_{seq // 1024}k_gb": f["peak_gb"] for seq, f in big.items()}
    write_report("tiles", {**peaks, **here}, args.json)


if __name__ == "__main__":
    main()
