"""What DynaPipe's GPT costs on A100s, by roofline; lengths of many tasks mixed.

DynaPipe's artifact has GPT "6.7b_16l", 65,536 tokens a step, sequences of up to 8,192 tokens, on
A100-40GB. Its profiles are not public, so the seconds here are a roofline of what Megatron ran at
that time: matrix products at half of the peak rate, and attention scores that go through memory
(no flash attention). It has 4 stages here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lengths import SHARED, read
from dcpc.runtime.pipeline.schedule import Hop, StageCost

FLOPS_PER_S = 0.5 * 312e12  # half of an A100's bf16 peak. Source: its data sheet
BYTES_PER_S = 1.555e12  # of an A100-40GB's memory. Source: its data sheet
LINK_BYTES_PER_S = 20e9  # between two GPUs, as a ring over 100 Gbit/s NICs and NVLink; ours
LAYER_S = 0.15e-3  # launches of one layer's forward, 15 kernels of 10 us; ours
MEMORY_BYTES = 40e9 * 0.9
STATE_BYTES = 18  # a parameter: bf16 value and gradient, fp32 value, gradient, two moments less one
# Passes over the attention scores: product, fused softmax, dropout.
FORWARD_PASSES, BACKWARD_PASSES = 6, 9
MEANS = ((52, 0.4), (120, 0.3), (300, 0.2), (978, 0.1))  # tokens, share of samples
LONGEST, TOKENS = 8192, 65_536

Array = Any  # a number or an array


@dataclass(frozen=True)
class Layer:
    """A transformer layer.

    Attributes:
        hidden: width.
        inner: heads * width of a head.
        heads: heads of attention.
        ffn: width of the MLP.
    """

    hidden: int
    inner: int
    heads: int
    ffn: int

    @property
    def parameters(self) -> int:
        """Elements of its matrices."""
        return (4 * self.inner + 2 * self.ffn) * self.hidden

    def scores(self, count: Array, length: Array) -> Array:
        """Elements of all score matrices."""
        return 1.0 * count * self.heads * length * length

    def core_s(self, count: Array, length: Array, passes: int) -> Array:
        """Seconds of attention's scores in a forward (2 products) or with twice these."""
        flops = 4 * self.scores(count, length) * (self.inner / self.heads)
        traffic = 2 * self.scores(count, length) * passes
        return flops * (passes / FORWARD_PASSES) / FLOPS_PER_S + traffic / BYTES_PER_S

    def linear_s(self, count: Array, length: Array) -> Array:
        """Seconds of a forward's matrix products with parameters."""
        return LAYER_S + 2 * count * length * self.parameters / FLOPS_PER_S

    def kept(self, count: Array, length: Array) -> Array:
        """Bytes saved for backward, without the scores.

        Source: Korthikanti et al. 2022: sbh (10 + 24) where inner = hidden and ffn = 4 hidden.
        """
        return count * length * (10 * self.hidden + 8 * self.inner + 4 * self.ffn)

    def apart(self, count: Array, length: Array) -> Array:
        """Bytes that gradients of parameters need: what each product took, and what it gave back.

        Attention's part of it has keys and values.
        """
        token = 4 * self.hidden + 2 * self.inner + 2 * self.ffn
        return 2 * count * length * (token + 2 * self.inner)

    def boundary(self, count: Array, length: Array) -> Array:
        """Bytes of its input."""
        return 2 * count * length * self.hidden


@dataclass(frozen=True)
class RooflinePipeline:
    """A model in stages.

    Settings of recompute: nothing, attention's scores in a quarter of a stage's layers, in a half
    and so on up to all of them, and whole layers.

    Attributes:
        layers: of each stage.
        carried: of each stage, width * share of what it sends on.
        settings: of recompute.
    """

    layers: tuple[tuple[Layer, ...], ...]
    carried: tuple[float, ...]
    settings: int = 6
    _seen: dict[tuple[int, int, int], tuple[StageCost, ...]] = field(default_factory=dict)

    @property
    def stages(self) -> int:
        return len(self.layers)

    @cached_property
    def memory_bytes(self) -> tuple[float, ...]:
        return tuple(
            MEMORY_BYTES - STATE_BYTES * sum(x.parameters for x in row) for row in self.layers
        )

    def figures(self, stage: int, setting: int, count: Array, length: Array) -> tuple[Array, ...]:
        """Forward, backward and weight seconds; held, forward, backward and weight bytes."""
        row = self.layers[stage]
        core_s = [x.core_s(count, length, FORWARD_PASSES) for x in row]
        linear_s = sum(x.linear_s(count, length) for x in row)
        scores = [5 * x.scores(count, length) for x in row]
        kept = [x.kept(count, length) for x in row]
        thin = [x.boundary(count, length) for x in row]
        back_s = 2 * linear_s + sum(x.core_s(count, length, BACKWARD_PASSES) for x in row)
        again = round(len(row) * min(1.0, setting / (self.settings - 2)))  # layers' scores
        back_s += sum(core_s[:again], 0.0)
        if setting < self.settings - 1:
            held = sum(scores[again:], 0.0) + sum(kept, 0.0)
            extra = scores[0] * (again > 0) + 2 * thin[0]
        else:
            back_s += linear_s
            held = sum(thin, 0.0)
            # one layer's own tensors beside what stays
            extra = np.maximum.reduce([a + b for a, b in zip(scores, kept, strict=True)])
        apart = sum((x.apart(count, length) for x in row), 0.0)
        return linear_s + sum(core_s), back_s, linear_s, held, held + extra, held + extra, apart

    def options(self, stage: int, count: int, longest: int) -> tuple[StageCost, ...]:
        """What a micro-batch costs, by setting."""
        key = (stage, count, longest)
        if key not in self._seen:
            found = [
                map(float, self.figures(stage, k, count, longest)) for k in range(self.settings)
            ]
            self._seen[key] = tuple(
                StageCost(f, b, w, held, most, back, apart, max(held, apart) + back - held, apart)
                for f, b, w, held, most, back, apart in found
            )
        return self._seen[key]

    def hop(self, stage: int, count: int, longest: int) -> Hop:
        """Messages at the link's rate."""
        size = 2.0 * count * longest * self.carried[stage]
        return Hop(size / LINK_BYTES_PER_S, size / LINK_BYTES_PER_S, size, size)

    def padded(self, setting: int, flight: int) -> PaddedRoofline:
        """Seconds and share of memory of the worst stage."""
        return PaddedRoofline(self, setting, flight)


@dataclass(frozen=True)
class PaddedRoofline:
    """`dcpc.microbatch`'s cost."""

    model: RooflinePipeline
    setting: int
    flight: int

    def seconds(self, count: Array, longest: Array) -> Array:
        found = (self.model.figures(s, self.setting, count, longest) for s in self._distinct)
        return np.maximum.reduce([f + b for f, b, *_ in found])

    def peak_bytes(self, count: Array, longest: Array) -> Array:
        shares = []
        for s in self._distinct:
            found = self.model.figures(s, self.setting, count, longest)
            more = min(self.flight, self.model.stages - s) - 1
            shares.append((found[4] + more * found[3]) / self.model.memory_bytes[s])
        return np.maximum.reduce(shares)

    @property
    def _distinct(self) -> list[int]:
        """Stages with layers that no earlier stage has."""
        rows = self.model.layers
        return [s for s in range(len(rows)) if rows[s] not in rows[:s]]


def gpt(stages: int = 4) -> RooflinePipeline:
    """GPT 6.7B with 16 of its layers."""
    layer = Layer(4096, 4096, 32, 4 * 4096)
    return RooflinePipeline(((layer,) * (16 // stages),) * stages, (4096.0,) * stages)


def tasks(seed: int, tokens: int = TOKENS, samples: int = 0) -> list[int]:
    """Lengths of a step of mixed tasks: GENERATED, log-normal around the tasks' means.

    Source: the means of the shortest and the longest kind of task are those that DynaPipe's paper
    names (MNLI 51.7 tokens, CNN/DailyMail 977.7); the others, the shares and the spread are ours.
    """
    rng = np.random.default_rng(seed)
    means, shares = np.array(MEANS).T
    found: list[int] = []
    while len(found) < samples if samples else sum(found) < tokens:
        mean = rng.choice(means, p=shares)
        found.append(int(np.clip(mean * np.exp(0.8 * rng.normal() - 0.32), 8, LONGEST)))
    return found


def documents(folder: Path | None = None) -> dict[str, list[int]]:
    """Batches of real lengths, cut at `LONGEST`; empty where there are none."""
    folder = folder or SHARED
    if not folder.is_dir():
        return {}
    names = ("wikipedia_192k_03", "wikipedia_192k_07", "heavytail_192k_1", "heavytail_192k_3")
    return {b.name: [min(x, LONGEST) for x in b.lens] for b in read(folder) if b.name in names}
