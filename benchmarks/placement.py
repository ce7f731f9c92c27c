"""Placement of a 28-layer GPT and of STDiT3-XL/2: time, width, what it finds.

And the distance of small ones from a MILP's optimum. With --quick the STDiT has 2 + 2 blocks of its
28 + 28, as tracing all of them takes a minute and a half of one core; `stdit_blocks` says how many.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import torch

from benchmarks.harness import Cell, parser, print_table, timed, write_report
from dcpc.buckets import Buckets
from dcpc.ir import Placement, Program, tensor_operands
from dcpc.ir.thresholds import SENDING_LOSS
from dcpc.passes.placement.placement import Objective, PlacementModel, place
from dcpc.passes.sharding.sharding import Sharding, analyse
from dcpc.symbolic_profile import find
from dcpc.trace import trace
from models.gpt import GPT, GPTConfig
from models.stdit import XL, STDiTConfig
from tests.cases.placement_oracle import Oracle, on_machine
from tests.cases.random_programs import random_program
from tests.cases.video_placement import (
    LONG_VIDEO,
    MANY_VIDEOS,
    changes,
    sent_bytes,
    stdit,
    switches,
    ulysses,
)

LAYERS = 28
DEGREES = (2, 4, 8)
LONG = {"batch": 1, "seq": 8192}
SIZES = (LONG, {"batch": 4, "seq": 1024})
# A CPU core's objective, and those of a GPU in a node: plans differ, the gap must not.
CPU = replace(on_machine(5e10, 1e10, 1e9, 5e-5, 5e-6), loss=SENDING_LOSS)
GPU = on_machine(4e14, 3e12, 2e11, 1e-5, 5e-6)
TIGHT = on_machine(4e14, 3e12, 2e11, 1e-9, 5e-6, held_s_per_byte=5e-12)  # memory is what counts


def gpt(layers: int, width: int = 256) -> Program:
    """A traced GPT with as many key/value heads as heads."""
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=258, dim=width, n_layers=layers, n_heads=8)
    inputs = {"input_ids": "int64[batch, seq]", "labels": "int64[batch, seq]"}
    buckets = Buckets(inputs=inputs, sizes=[{"seq": 16}, {"seq": 8192}])
    return trace(GPT(config), buckets)


def activation_changes(program: Program, placement: Placement) -> list[str]:
    """The values that a collective is run on in forward, once for each label they are wanted in."""
    found = {}
    for node in program.gm.graph.nodes:
        if node.name not in placement.nodes:
            continue
        wanted = placement.nodes[node.name].operands
        for source, want in zip(tensor_operands(node, program.info), wanted, strict=False):
            have = placement.nodes[source.name].output
            if have != want and (have.sharded or have.partial):
                found[source.name, want] = f"{source.name}: {have} -> {want}"
    return list(found.values())


def solve_times(
    model: PlacementModel, repeats: int
) -> Iterator[tuple[dict[str, int], int, Placement, float, float]]:
    """Yields (sizes, degree, placement, seconds of the first call, median of the later ones)."""
    for sizes, sp in product(SIZES, DEGREES):
        seconds = []
        for _ in range(repeats + 1):
            with timed() as t:
                found = place(model.program, model.sharding, sizes, sp, CPU, model)
            seconds.append(t.elapsed_s)
        yield sizes, sp, found, seconds[0], statistics.median(seconds[1:])


def gap(
    program: Program, sharding: Sharding, sizes: dict[str, int], sp: int, objective: Objective
) -> float:
    """|cost / MILP's optimum and the gap told - 1|, of the cost as claimed and as a sum says."""
    found = place(program, sharding, sizes, sp, replace(objective, loss=SENDING_LOSS))
    oracle = Oracle(program, sharding, sizes, sp, objective)
    optimum = oracle.minimum() * (1 + found.gap)
    return max(abs(c / optimum - 1) for c in (found.cost_s, oracle.cost(found.nodes)))


def random_gaps(count: int) -> list[float]:
    """Gaps of small random programs at random sizes, degrees and rates."""
    gaps = []
    for seed in range(count):
        rng = random.Random(seed)
        program = random_program(seed, rng.randint(3, 9))
        sizes = {"batch": rng.choice([1, 2, 3, 8]), "seq": rng.choice([2, 7, 64, 1000])}
        objective = on_machine(*(10 ** rng.uniform(a, a + 3) for a in (9.0, 8.0, 7.0, -7.0, -7.0)))
        gaps.append(gap(program, analyse(program), sizes, rng.choice([2, 3, 4]), objective))
    return gaps


def real_gaps(cases: Sequence[tuple[dict[str, int], int, Objective]]) -> list[float]:
    """Gaps of a 2-layer GPT."""
    program = gpt(2, width=64)
    sharding = analyse(program)
    return [gap(program, sharding, *case) for case in cases]


def video(depth: int, repeats: int) -> dict[str, Cell]:
    """Figures of an STDiT3-XL/2 of `depth` spatial and as many temporal blocks on H200s."""
    config = XL if depth == XL.depth else STDiTConfig(depth=depth)
    device = find("h200")
    with timed() as tracing:
        program = stdit(config)
    with timed() as analysis:
        sharding = analyse(program)
        model = PlacementModel(program, sharding)
    forced = ulysses(program, sharding)
    rows: list[list[Cell]] = []
    for sizes, sp in product((LONG_VIDEO, MANY_VIDEOS), DEGREES):
        objective = Objective.of_group(device, sp)
        seconds = []
        for _ in range(repeats + 1):
            with timed() as t:
                found = place(program, sharding, sizes, sp, objective, model)
            seconds.append(t.elapsed_s)
        bytes_ratio = sent_bytes(program, found, sizes)
        if sizes is LONG_VIDEO:
            other = place(program, forced, sizes, sp, objective)
            bytes_ratio /= sent_bytes(program, other, sizes)
        where = ", ".join(f"{k} {v}" for k, v in sizes.items())
        rings = sum(chosen.name == "ring" for chosen in found.nodes.values())
        per_pair = (len(switches(program, found, sizes)) + rings) / depth
        collectives = len(changes(program, found)) + rings
        median_s = statistics.median(seconds[1:])
        sent = per_pair, collectives, bytes_ratio, found.gap
        rows.append([where, sp, seconds[0], median_s, found.width, *sent])
    header = ["bucket", "sp", "first s", "median s", "width", "switches/pair", "collectives"]
    print_table(
        f"STDiT3-XL/2, {depth} + {depth} blocks, {len(model.names)} nodes; bytes over Ulysses where"
        " the batch is 1, else bytes",
        [*header, "bytes", "cost over least"],
        rows,
    )
    alone = rows[: len(DEGREES)]
    return {
        "stdit_xl_solve_s": max(float(row[3]) for row in rows),
        "stdit_xl_first_solve_s": max(float(row[2]) for row in rows),
        "stdit_switches_per_block_pair": max(float(row[5]) for row in alone),
        "stdit_bytes_over_ulysses": max(float(row[7]) for row in alone),
        "stdit_batch_collectives": max(int(row[6]) for row in rows[len(DEGREES) :]),
        "stdit_treewidth": max(int(row[4]) for row in rows), "stdit_blocks": 2 * depth,
        "stdit_trace_s": tracing.elapsed_s, "stdit_analysis_s": analysis.elapsed_s,
    }  # fmt: skip


def main() -> None:
    args = parser("placement", __doc__ or "").parse_args()
    with timed() as tracing:
        program = gpt(LAYERS)
    with timed() as analysis:
        sharding = analyse(program)
        model = PlacementModel(program, sharding)
    solved = list(solve_times(model, repeats=3 if args.quick else 15))
    rows: list[list[Cell]] = []
    for sizes, sp, found, first_s, median_s in solved:
        per_layer = len(activation_changes(program, found)) / LAYERS
        where = ", ".join(f"{k} {v}" for k, v in sizes.items())
        rows.append([where, sp, first_s, median_s, found.width, per_layer, found.cost_s])
    header = ["bucket", "sp", "first s", "median s", "width", "collectives/layer", "cost s"]
    print_table(f"{LAYERS}-layer GPT, {len(model.names)} nodes", header, rows)
    cases = [(LONG, 4, CPU), (LONG, 8, GPU), (LONG, 4, TIGHT), ({"batch": 4, "seq": 64}, 2, CPU)]
    if not args.quick:
        cases += [(sizes, sp, GPU) for sizes, sp in product(SIZES, DEGREES)]
    random_found, real_found = random_gaps(30 if args.quick else 200), real_gaps(cases)
    long_sp4 = next(found for sizes, sp, found, _, _ in solved if sizes is LONG and sp == 4)
    figures: dict[str, Cell] = {
        "gpt28_solve_s": max(median_s for *_, median_s in solved),
        "gpt28_first_solve_s": max(first_s for *_, first_s, _ in solved),
        "gpt28_analysis_s": analysis.elapsed_s, "gpt28_trace_s": tracing.elapsed_s,
        "gpt28_nodes": len(model.names),
        "gpt28_treewidth": max(found.width for _, _, found, _, _ in solved),
        "optimality_gap_vs_milp": max(*random_found, *real_found),
        "milp_graphs": len(random_found) + len(real_found),
        "gpt_collectives_per_layer": len(activation_changes(program, long_sp4)) / LAYERS,
    }  # fmt: skip
    figures |= video(2 if args.quick else XL.depth, repeats=3 if args.quick else 15)
    print_table("placement", ["figure", "value"], [[k, v] for k, v in figures.items()], digits=4)
    write_report("placement", figures, args.json)


if __name__ == "__main__":
    main()
