"""Padding removed: is it exact, what does it save, and is it never slower?

python -m benchmarks.unpad [--quick] [--json FILE]

A BERT with a masked-language head trains on batches of which a share is valid: forward and
backward, one thread, medians of interleaved calls. Seconds are those that the process computes, so
that what else runs on the machine hardly counts. Beside it: the same compiled with padding, and
torch's nested tensors on layers of the same sizes. A Llama runs beside transformers' own row of
flattened samples, which BERT has not (`unpad_flattened.py`), and a T5 whose two sides have padding.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import dcpc
from benchmarks.harness import Cell, interleaved, parser, print_table, write_report
from benchmarks.unpad_flattened import flattened_call, flattened_error, llama
from dcpc.verify.exactness import gradient_errors, loss_error
from dcpc.verify.reference import plain
from tests.cases.unpad_t5 import INPUTS as T5_INPUTS
from tests.cases.unpad_t5 import batch_of as t5_batch
from tests.cases.unpad_t5 import t5

INPUTS = {
    "input_ids": "int64[batch, seq]", "attention_mask": "int64[batch, seq]",
    "labels": "int64[batch, seq]",
}  # fmt: skip
SHARES = (0.1, 0.22, 0.41, 0.6, 0.8, 0.9, 0.95, 1.0)
OTHERS_AT = (0.22, 0.41)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a BERT and its batches."""

    width: int
    layers: int
    heads: int
    vocabulary: int
    batch: int
    seq: int
    repeats: int


BASE = Shape(768, 4, 12, 30522, 16, 128, 5)  # layers of BERT-base; all of its twelve are alike
QUICK = Shape(256, 3, 4, 4000, 8, 128, 3)
TINY = Shape(32, 2, 2, 50, 5, 24, 0)


def bert(shape: Shape) -> nn.Module:
    """A BERT of these sizes, without dropout."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=shape.width, num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        intermediate_size=4 * shape.width, vocab_size=shape.vocabulary, max_position_embeddings=512,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def lengths_of(shape: Shape, share: float) -> list[int]:
    """Lengths of one batch, spread evenly about their mean; the longest may be all of `seq`."""
    spread = min(share, 1 - share)
    places = [2 * i / (shape.batch - 1) - 1 for i in range(shape.batch)]
    return [max(1, round(shape.seq * (share + spread * p))) for p in places]


def batch_of(shape: Shape, lengths: Sequence[int]) -> dict[str, Tensor]:
    """A batch of samples of these lengths, all of whose tokens are predicted."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(5, shape.vocabulary, (len(lengths), shape.seq), generator=g)
    mask = (torch.arange(shape.seq) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask > 0, ids, -100)}


def compiled(
    model: nn.Module, shape: Shape, unpad: bool | str, inputs: Mapping[str, str] = INPUTS
) -> dcpc.CompiledModel:
    """The model compiled for one length; targets, if it has any, are half as long."""
    both = {"seq": shape.seq, "target": shape.seq // 2}
    named = {n: s for n, s in both.items() if any(n in spec for spec in inputs.values())}
    buckets = dcpc.Buckets(inputs, [named])
    return dcpc.compile(model, buckets, backend="eager", unpad=unpad, verify="off")


def worst_error() -> float:
    """Largest relative error, in float64, of a loss or a gradient over lengths 1 to L."""
    model = bert(TINY).double()
    made = compiled(model, TINY, True)
    worst = 0.0
    for first in range(1, TINY.seq + 1, 5):
        lengths = [1 + (first * (i + 1)) % TINY.seq for i in range(TINY.batch)]
        inputs = batch_of(TINY, lengths)
        expected = plain(model, inputs)
        got = made(**inputs)
        got.backward()
        errors = gradient_errors(model, expected.gradients).values()
        worst = max(worst, loss_error(got, expected.loss), *errors)
        model.zero_grad()
    return worst


def matmul_flops(shape: Shape, valid: int) -> int:
    """FLOPs of matrix products of that many rows: each weight once forward, twice backward."""
    layer = (4 + 8) * shape.width**2
    head = shape.width**2 + shape.width * shape.vocabulary
    return 6 * valid * (shape.layers * layer + head)


class FlopCounter(TorchDispatchMode):
    """Counts FLOPs by torch's formulas of ops; it has none of dcpc's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Runs an op and counts it."""
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        self.total += formula(*args, **(kwargs or {}), out_val=out) if formula else 0
        return out


def counted_flops(made: dcpc.CompiledModel, inputs: Mapping[str, Tensor]) -> int:
    """What torch counts of a call's matrix products."""
    with FlopCounter() as counter:
        made(**inputs).backward()
    return counter.total


class NestedLayers(nn.Module):
    """Layers and a head as BERT's, of torch's nested tensors."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d = shape.width
        self.heads = shape.heads
        self.tokens = nn.Embedding(shape.vocabulary, d)
        self.layers = nn.ModuleList(
            nn.ModuleDict({
                "q": nn.Linear(d, d), "k": nn.Linear(d, d), "v": nn.Linear(d, d),
                "o": nn.Linear(d, d), "n1": nn.LayerNorm(d), "n2": nn.LayerNorm(d),
                "up": nn.Linear(d, 4 * d), "down": nn.Linear(4 * d, d),
            })
            for _ in range(shape.layers)
        )  # fmt: skip
        self.dense, self.head = nn.Linear(d, d), nn.Linear(d, shape.vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        """The loss of a jagged tensor of tokens, all of which are predicted."""
        x = self.tokens(ids)
        for layer in self.layers:
            q, k, v = (
                layer[n](x).unflatten(-1, [self.heads, -1]).transpose(1, 2) for n in ("q", "k", "v")
            )
            found = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
            x = layer["n1"](x + layer["o"](found))
            x = layer["n2"](x + layer["down"](F.gelu(layer["up"](x))))
        logits = self.head(F.gelu(self.dense(x)))
        return F.cross_entropy(logits.values(), ids.values())


def nested_call(shape: Shape, lengths: Sequence[int]) -> Callable[[], object]:
    """A forward and backward of nested tensors."""
    torch.manual_seed(0)
    model = NestedLayers(shape)
    ids = torch.nested.nested_tensor(
        [torch.randint(5, shape.vocabulary, (n,)) for n in lengths], layout=torch.jagged
    )

    def call() -> None:
        model(ids).backward()

    return call


def race(shape: Shape) -> tuple[list[list[Cell]], dict[str, Cell]]:
    """Rows of a table, and figures, of all shares."""
    model = bert(shape)
    made = {mode: compiled(model, shape, mode) for mode in (False, "auto")}
    rows: list[list[Cell]] = []
    figures: dict[str, Cell] = {}
    slowdowns: list[float] = []
    flops = 0.0
    for share in SHARES:
        lengths = lengths_of(shape, share)
        inputs = batch_of(shape, lengths)
        others = {"nested": nested_call(shape, lengths)} if share in OTHERS_AT else {}
        seconds, without = taken(made, inputs, others, shape.repeats)
        speedup = seconds["padded"] / seconds["auto"]
        slowdowns.append(1 / speedup)
        if share in OTHERS_AT:
            figures[f"speedup_at_{share * 100:.0f}"] = round(speedup, 3)
            nested = seconds["padded"] / seconds["nested"]
            figures[f"nested_speedup_at_{share * 100:.0f}"] = round(nested, 3)
        if without:
            ratio = counted_flops(made["auto"], inputs) / matmul_flops(shape, sum(lengths))
            flops = max(flops, ratio)
        rows.append([
            f"{share:.0%}", sum(lengths) / shape.batch / shape.seq, seconds["padded"],
            seconds["auto"], speedup, "yes" if without else "no", seconds.get("nested"),
        ])  # fmt: skip
        model.zero_grad()
    figures["worst_slowdown"] = round(max(slowdowns), 3)
    figures["flops_over_formula"] = round(flops, 4)
    return rows, figures


def taken(
    made: Mapping[bool | str, dcpc.CompiledModel],
    inputs: Mapping[str, Tensor],
    others: Mapping[str, Callable[[], object]],
    repeats: int,
) -> tuple[dict[str, float], bool]:
    """Seconds of a batch with padding, without and of others; whether it ran without."""
    calls: dict[str, Callable[[], object]] = {
        "padded": lambda: made[False](**inputs).backward(),
        "auto": lambda: made["auto"](**inputs).backward(),
    }
    before = made["auto"].stats().unpadded
    each = interleaved({**calls, **others}, repeats)
    seconds = {name: statistics.median(times) for name, times in each.items()}
    return seconds, made["auto"].stats().unpadded > before


def flattened_race(shape: Shape) -> tuple[list[list[Cell]], dict[str, Cell]]:
    """Rows of a table, and figures, of a Llama beside transformers' row of all samples."""
    model = llama(shape.width, shape.layers, shape.heads, shape.vocabulary)
    made = {mode: compiled(model, shape, mode) for mode in (False, "auto")}
    rows: list[list[Cell]] = []
    figures: dict[str, Cell] = {}
    for share in (*OTHERS_AT, 0.8):
        lengths = lengths_of(shape, share)
        inputs = batch_of(shape, lengths)
        others = {"flattened": flattened_call(model, inputs, lengths)}
        seconds, without = taken(made, inputs, others, shape.repeats)
        speedups = {n: seconds["padded"] / seconds[n] for n in ("auto", "flattened")}
        at = f"{share * 100:.0f}"
        figures[f"llama_speedup_at_{at}"] = round(speedups["auto"], 3)
        figures[f"flattened_speedup_at_{at}"] = round(speedups["flattened"], 3)
        rows.append([
            f"{share:.0%}", seconds["padded"], seconds["auto"], speedups["auto"],
            "yes" if without else "no", seconds["flattened"], speedups["flattened"],
        ])  # fmt: skip
        model.zero_grad()
    return rows, figures


def t5_race(shape: Shape) -> tuple[list[list[Cell]], dict[str, Cell]]:
    """Rows of a table, and figures, of a T5 whose padding is left out on both sides."""
    model = t5(shape.width, shape.layers, shape.heads, shape.vocabulary)
    made = {mode: compiled(model, shape, mode, T5_INPUTS) for mode in (False, "auto")}
    rows: list[list[Cell]] = []
    figures: dict[str, Cell] = {}
    for share in (*OTHERS_AT, 0.8):
        inputs = t5_batch(shape.vocabulary, shape.seq, lengths_of(shape, share))
        seconds, without = taken(made, inputs, {}, shape.repeats)
        speedup = seconds["padded"] / seconds["auto"]
        figures[f"t5_speedup_at_{share * 100:.0f}"] = round(speedup, 3)
        found = "yes" if without else "no"
        rows.append([f"{share:.0%}", seconds["padded"], seconds["auto"], speedup, found])
        model.zero_grad()
    return rows, figures


def main() -> None:
    """Runs it."""
    given = parser("unpad", "Padding removed from a BERT's batches.").parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    shape = QUICK if given.quick else BASE
    figures: dict[str, Cell] = {"worst_relative_error": worst_error()}
    batch = f"batch {shape.batch} x {shape.seq}"
    layers, times = f"{shape.layers} x {shape.width}", ["padded", "auto", "speedup", "unpadded"]
    races = (
        (f"BERT {layers}, {batch}", race, ["valid", "share", *times, "nested tensors"]),
        (f"Llama {layers}, {batch}", flattened_race, ["valid", *times, "flattened", "its speedup"]),
        (
            f"T5 {shape.layers} + {layers}, {batch} and {shape.seq // 2}", t5_race,
            ["valid", *times],
        ),
    )  # fmt: skip
    for title, run, header in races:
        rows, more = run(shape)
        print_table(f"{title}, CPU seconds", header, rows)
        figures |= more
    small = llama(TINY.width, TINY.layers, TINY.heads, TINY.vocabulary).double()
    lengths = lengths_of(TINY, 0.4)
    figures["flattened_relative_error"] = flattened_error(small, batch_of(TINY, lengths), lengths)
    for name, value in figures.items():
        print(f"{name}: {value}")
    write_report("unpad", figures, given.json)


if __name__ == "__main__":
    main()
