"""What moves at which length, weights or activations, where ranks keep pieces of the weights.

Predicted, by the placement itself: nothing in dcpc/ stores weights split yet. A decoder of two
layers of an 8B and of a 70B shape; each class of equal weights has one stored label for all
lengths, which have equal shares of the tokens. Costs are the placement's: seconds, and the price of
bytes that are kept for backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from benchmarks.harness import Cell, parser, print_table, timed, write_report
from dcpc.buckets import Buckets
from dcpc.ir import Label
from dcpc.passes.placement.placement import Objective, PlacementModel, placed, solve
from dcpc.passes.sharding.sharding import Sharding, analyse
from dcpc.symbolic_profile import find
from dcpc.trace import trace
from models.gpt import GPT, GPTConfig
from tests.cases.stored_labels import classes, forced, splits, stored
from tests.cases.video_placement import sent_bytes

SHAPES = {"8B": (4096, 32), "70B": (8192, 64)}
LENGTHS = (1024, 4096, 16384, 65536, 262144)
TOKENS = {"input_ids": "int64[batch, seq]", "labels": "int64[batch, seq]"}
Labels = dict[str, Label]  # class of weights -> its stored label


class Mixture:
    """One model, and the costs of stored labels at all lengths.

    Args:
        width: hidden size.
        heads: number of heads; there are eight key heads.
        layers: number of layers.
        sp: number of ranks, which all take one sequence together.
    """

    def __init__(self, width: int, heads: int, layers: int, sp: int) -> None:
        config = GPTConfig(
            vocab_size=32000, dim=width, n_layers=layers, n_heads=heads, n_kv_heads=8
        )
        with torch.device("meta"):
            model = GPT(config).to(torch.bfloat16)
        self.program = trace(model, Buckets(TOKENS, [{"seq": 16}, {"seq": 8192}]))
        self.sharding, self.sp = analyse(self.program), sp
        self.objective = replace(Objective.of_group(find("h200"), sp), loss=0.0)
        self.classes = classes(self.program, self.sharding)
        self.free = {c: splits(self.sharding, names[0]) for c, names in self.classes.items()}
        self.searches = 0

    def of_names(self, labels: Mapping[str, Sequence[Label]]) -> dict[str, Sequence[Label]]:
        """Returns the labels of each weight, given those of its class."""
        return {name: labels[c] for c, names in self.classes.items() for name in names}

    def solved(self, sharding: Sharding) -> tuple[list[float], list[Labels], list[float]]:
        """Returns for each length the cost, the labels of weights, and bytes sent in forward."""
        self.searches += 1
        model = PlacementModel(self.program, sharding)
        sizes = [{"batch": 1, "seq": n} for n in LENGTHS]
        bests = solve(self.program, sizes, self.sp, self.objective, model)
        found = [placed(best, model) for best in bests]
        labels = [{c: p.nodes[n[0]].output for c, n in self.classes.items()} for p in found]
        pairs = zip(found, sizes, strict=True)
        sent = [sent_bytes(self.program, p, each) for p, each in pairs]
        return [p.cost_s for p in found], labels, sent

    def total(self, labels: Labels) -> float:
        """Returns the cost of a mixture with as many tokens of each length."""
        held = stored(self.sharding, self.of_names({c: [at] for c, at in labels.items()}))
        return mixed(self.solved(held)[0])

    def search(self, starts: Sequence[Labels]) -> tuple[Labels, float]:
        """Returns the best labels and their cost: from a bucket's, one class changed at a time."""
        best_s, best = min(((self.total(s), s) for s in starts), key=lambda found: found[0])
        changed = True
        while changed:
            changed = False
            for name, at in [(c, at) for c, of in self.free.items() for at in of]:
                other = {**best, name: at}
                other_s = self.total(other) if other != best else best_s
                if other_s < best_s * (1 - 1e-9):
                    best, best_s, changed = other, other_s, True
        return best, best_s


def mixed(costs_s: Sequence[float]) -> float:
    """Returns the cost of equal shares of tokens of all lengths."""
    return sum(c / n for c, n in zip(costs_s, LENGTHS, strict=True))


def measured(name: str, sp: int) -> tuple[dict[str, float], list[list[Cell]]]:
    """Returns the figures of one shape on so many ranks, and a row for each length."""
    model = Mixture(*SHAPES[name], 2, sp)
    with timed() as search:
        bound, starts, sent = model.solved(stored(model.sharding, model.of_names(model.free)))
        labels, best_s = model.search(
            [each for i, each in enumerate(starts) if each not in starts[:i]]
        )
    one = {n: at for c, at in labels.items() for n in model.classes[c]}
    costs, _, _ = model.solved(stored(model.sharding, {n: [at] for n, at in one.items()}))
    tensor, gathered = (
        model.solved(forced(model.program, model.sharding, one, whole))[0]
        for whole in (False, True)
    )
    deeper = Mixture(*SHAPES[name], 3, sp)
    layer = deeper.solved(stored(deeper.sharding, deeper.of_names(deeper.free)))[2][0] - sent[0]
    megatron = 4 * LENGTHS[0] * SHAPES[name][0] * torch.bfloat16.itemsize * (sp - 1)
    rows: list[list[Cell]] = [
        [name, sp, n, 1e3 * ours, 1e3 * a, 1e3 * b, ours / min(a, b)]
        for n, ours, a, b in zip(LENGTHS, costs, tensor, gathered, strict=True)
    ]
    return {
        "mixture_gap": best_s / mixed(bound) - 1,
        "cost_over_best_fixed": best_s / min(mixed(tensor), mixed(gathered)),
        "megatron_bytes_over_ours": megatron / layer,
        "search_s": search.elapsed_s, "searches": model.searches,
    }, rows  # fmt: skip


def main() -> None:
    args = parser("labels", __doc__ or "").parse_args()
    cases = [(name, sp) for name in SHAPES for sp in ((8,) if args.quick else (2, 4, 8, 64))]
    found = {case: measured(*case) for case in cases}
    rows = [row for _, own in found.values() for row in own]
    header = ["shape", "ranks", "tokens", "ours ms", "all tensor ms", "all gathered ms"]
    print_table("costs of a sequence", [*header, "over the better"], rows)
    figures: dict[str, Cell] = {}
    for (name, sp), (own, _) in found.items():
        figures |= {f"{figure}_{name}_{sp}": value for figure, value in own.items()}
    print_table("labels", ["figure", "value"], [[k, v] for k, v in figures.items()], digits=4)
    write_report("labels", figures, args.json)


if __name__ == "__main__":
    main()
