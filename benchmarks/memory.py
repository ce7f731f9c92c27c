"""Predicted bytes against measured ones: `python -m benchmarks.memory [--quick] [--json FILE]`.

Each model is traced once with symbolic batch and length. At sizes the trace never saw the
prediction is compared with what the eager variant does: its peak by torch.profiler's allocator
events, and the bytes it saves by the real storages that its autograd node holds.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import dcpc
from benchmarks import harness
from dcpc.trace import trace
from examples.allocator import measured_peak_bytes
from examples.forced import ForcedVariant
from models.gpt import GPT, GPTConfig

VOCAB = 258
INPUTS = {"input_ids": "int64[batch, seq]", "labels": "int64[batch, seq]"}
# (batch, seq): odd ones, a batch of one, and both a wide and a long one.
SIZES = ((1, 777), (3, 203), (5, 64), (2, 1001))
MORE_SIZES = (*SIZES, (1, 2048), (1, 4095), (7, 333), (16, 96))


@dataclass(frozen=True, slots=True)
class Point:
    """One comparison.

    Attributes:
        model: its name.
        recompute: "none" or "all".
        batch: samples.
        seq: length.
        predicted_bytes: peak, above parameters and inputs.
        measured_bytes: the same.
        predicted_saved_bytes: kept between forward and backward.
        measured_saved_bytes: the same.
    """

    model: str
    recompute: str
    batch: int
    seq: int
    predicted_bytes: int
    measured_bytes: int
    predicted_saved_bytes: int
    measured_saved_bytes: int

    @property
    def peak_error(self) -> float:
        """Relative."""
        return abs(self.predicted_bytes / self.measured_bytes - 1)

    @property
    def saved_error(self) -> float:
        """Relative."""
        return abs(self.predicted_saved_bytes / self.measured_saved_bytes - 1)

    def row(self) -> tuple[harness.Cell, ...]:
        """A line of the table."""
        return (
            f"{self.model}, recompute {self.recompute}, {self.batch} x {self.seq}",
            self.predicted_bytes / 1e6,
            self.measured_bytes / 1e6,
            100 * self.peak_error,
            self.predicted_saved_bytes / 1e6,
            self.measured_saved_bytes / 1e6,
            100 * self.saved_error,
        )


def gpt() -> nn.Module:
    """Returns a two-layer GPT of ours."""
    return GPT(GPTConfig(vocab_size=VOCAB, dim=64, n_layers=2, n_heads=4))


def llama() -> nn.Module:
    """Returns a two-layer Llama of the transformers library, two query heads to a K/V head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
    )
    return LlamaForCausalLM(config)


MODELS: dict[str, Callable[[], nn.Module]] = {"GPT": gpt, "Llama": llama}


def measure(name: str, sizes: Sequence[tuple[int, int]]) -> list[Point]:
    """Returns the points of one model."""
    compiled = dcpc.compile(
        MODELS[name](), buckets_of(sizes), recompute="none", backend="eager", memory=1e12
    )
    hints = (compiled.program.hints["batch"], compiled.program.hints["seq"])
    assert hints not in sizes, f"the trace saw {hints}: choose another point"
    placement = compiled.variants.placement({"batch": sizes[0][0], "seq": sizes[0][1]}, 1)
    points = []
    for recompute in (0, compiled.variants.steps(placement)):
        variant = ForcedVariant(compiled, placement, recompute)
        points += [_point(name, variant, batch, seq) for batch, seq in sizes]
    return points


def _point(name: str, variant: ForcedVariant, batch: int, seq: int) -> Point:
    inputs = {k: torch.randint(0, VOCAB, (batch, seq)) for k in INPUTS}
    saved_bytes = _saved_bytes(variant(**inputs))  # the first call compiles
    variant.zero_grad()

    def run() -> Tensor:
        loss = variant(**inputs)
        loss.backward()
        return loss

    measured_bytes = measured_peak_bytes(run)
    cost = variant.predict({"batch": batch, "seq": seq})
    return Point(
        model=name,
        recompute="all" if variant.recompute else "none",
        batch=batch,
        seq=seq,
        predicted_bytes=cost.peak_bytes,
        measured_bytes=measured_bytes,
        predicted_saved_bytes=cost.saved_bytes,
        measured_saved_bytes=saved_bytes,
    )


def buckets_of(sizes: Sequence[tuple[int, int]]) -> dcpc.Buckets:
    """Returns a shape bucket for each (batch, seq)."""
    return dcpc.Buckets(INPUTS, [{"batch": batch, "seq": seq} for batch, seq in sizes])


def trace_seconds(sizes: Sequence[tuple[int, int]]) -> float:
    """Returns the seconds of the slowest trace; one trace serves all sizes."""
    slowest_s = 0.0
    for make in MODELS.values():
        model, buckets = make(), buckets_of(sizes)
        with harness.timed() as watch:
            trace(model, buckets)
        slowest_s = max(slowest_s, watch.elapsed_s)
    return slowest_s


def _saved_bytes(loss: Tensor) -> int:
    """Returns the bytes of the distinct storages that wait for backward; resident ones excepted."""
    node = loss.grad_fn
    resident = {_storage(t) for t in node.primals if isinstance(t, Tensor)}
    found = {_storage(t): t.untyped_storage().nbytes() for t in node.saved if isinstance(t, Tensor)}
    return sum(size for key, size in found.items() if key not in resident)


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def main() -> None:
    """Runs the benchmark."""
    args = harness.parser("memory", __doc__.partition("\n")[0]).parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the models are small: more threads only wait for each other
    sizes = SIZES if args.quick else MORE_SIZES
    trace_s = trace_seconds(sizes)
    points = [point for name in MODELS for point in measure(name, sizes)]
    header = ("point", "peak MB", "measured", "off %", "saved MB", "measured", "off %")
    harness.print_table("predicted against measured", header, [p.row() for p in points], digits=4)
    figures = {
        "points": len(points),
        "max_error_peak": max(p.peak_error for p in points),
        "max_error_saved": max(p.saved_error for p in points),
        "trace_s": trace_s,
    }
    harness.print_table("memory", ("figure", "value"), list(figures.items()), digits=6)
    harness.write_report("memory", figures, args.json)


if __name__ == "__main__":
    main()
