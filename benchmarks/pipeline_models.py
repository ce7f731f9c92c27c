"""What DynaPipe's two models cost on A100s, by roofline; lengths of many tasks mixed.

DynaPipe's artifact has GPT "6.7b_16l" and T5 "11b_24l", 65,536 tokens a step, sequences of up to
8,192 tokens, on A100-40GB. Its profiles are not public, so the seconds here are a roofline of what
Megatron ran at that time: matrix products at half of the peak rate, and attention scores that go
through memory (no flash attention). Both have 4 stages here; T5 has 4 GPUs in each, as one cannot
hold the scores of 8,192 packed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lengths import SHARED, read
from dcpc.runtime.pipeline.schedule import Hop, StageCost
from dcpc.runtime.planner.splits.microbatch import microbatch

FLOPS_PER_S = 0.5 * 312e12  # half of an A100's bf16 peak. Source: its data sheet
BYTES_PER_S = 1.555e12  # of an A100-40GB's memory. Source: its data sheet
LINK_BYTES_PER_S = 20e9  # between two GPUs, as a ring over 100 Gbit/s NICs and NVLink; ours
NVLINK_BYTES_PER_S = 200e9  # of an all-reduce in a node; ours
LAYER_S = 0.15e-3  # launches of one layer's forward, 15 kernels of 10 us; ours
MEMORY_BYTES = 40e9 * 0.9
STATE_BYTES = 18  # a parameter: bf16 value and gradient, fp32 value, gradient, two moments less one
# Passes over the attention scores: product, fused softmax, dropout; T5 adds its bias.
FORWARD_PASSES, BACKWARD_PASSES, BIAS_PASSES = 6, 9, 2
MEANS = ((52, 0.4), (120, 0.3), (300, 0.2), (978, 0.1))  # tokens, share of samples
LONGEST, TOKENS = 8192, 65_536

Array = Any  # a number or an array


@dataclass(frozen=True)
class Layer:
    """A transformer layer.

    Attributes:
        hidden: width.
        inner: heads * width of a head.
        heads: of attention.
        ffn: width of the MLP.
        share: its tokens, as a share of the sample's length.
        cross: tokens it also attends to, as a share; 0: none.
        bias: whether scores get a bias.
        tensor: GPUs that share its heads and its MLP (tensor parallel); all figures are of one.
    """

    hidden: int
    inner: int
    heads: int
    ffn: int
    share: float = 1.0
    cross: float = 0.0
    bias: bool = False
    tensor: int = 1

    @property
    def parameters(self) -> int:
        """Matrices alone."""
        blocks = 2 if self.cross else 1
        return (blocks * 4 * self.inner + 2 * self.ffn) * self.hidden // self.tensor

    def scores(self, count: Array, length: Array) -> Array:
        """Elements of all score matrices."""
        own = self.share * length
        return count * self.heads / self.tensor * own * (own + self.cross * length)

    def core_s(self, count: Array, length: Array, passes: int) -> Array:
        """Seconds of attention's scores in a forward (2 products) or with twice these."""
        flops = 4 * self.scores(count, length) * (self.inner / self.heads)
        traffic = 2 * self.scores(count, length) * (passes + BIAS_PASSES * self.bias)
        return flops * (passes / FORWARD_PASSES) / FLOPS_PER_S + traffic / BYTES_PER_S

    def linear_s(self, count: Array, length: Array) -> Array:
        """Seconds of a forward's matrix products with parameters, and of its two all-reduces."""
        other = 2 * self.hidden * self.inner // self.tensor  # keys and values of the other side
        own = self.parameters - (other if self.cross else 0)
        flops = 2 * count * length * (own * self.share + other * self.cross)
        sums = 2 * 2 * (1 - 1 / self.tensor) * self.boundary(count, length)
        return LAYER_S + flops / FLOPS_PER_S + sums / NVLINK_BYTES_PER_S

    def kept(self, count: Array, length: Array) -> Array:
        """Bytes saved for backward, without the scores.

        Source: Korthikanti et al. 2022: sbh (10 + 24 / t) where inner = hidden and ffn = 4 hidden.
        """
        blocks = 2 if self.cross else 1
        token = 10 * self.hidden + (8 * blocks * self.inner + 4 * self.ffn) / self.tensor
        return count * length * self.share * token

    def apart(self, count: Array, length: Array) -> Array:
        """Bytes that gradients of parameters need: what each product took, and what it gave back.

        Attention's part of it has keys and values of its own side, and of the other one.
        """
        blocks = 2 if self.cross else 1
        inner, ffn = self.inner / self.tensor, self.ffn / self.tensor
        token = blocks * (2 * self.hidden + 2 * inner) + 2 * self.hidden + 2 * ffn
        both = 2 * inner * (self.share + self.cross)  # gradients of keys and values
        return 2 * count * length * (self.share * token + both)

    def boundary(self, count: Array, length: Array) -> Array:
        """Bytes of its input."""
        return 2 * count * length * self.share * self.hidden


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


def t5(stages: int = 4, length: int = 1024) -> RooflinePipeline:
    """T5-11B, 24 and 24 layers; targets have a quarter of the tokens.

    Cut where the slowest stage is fastest at a length, and each has memory for a step.
    """
    wide = Layer(1024, 16384, 128, 65536, bias=True, tensor=4)
    layers = (wide,) * 24 + (replace(wide, share=0.25, cross=1.0),) * 24
    each = np.cumsum([0.0] + [3 * x.linear_s(1, length) + x.core_s(1, length, 15) for x in layers])
    sizes = np.cumsum([0] + [x.parameters for x in layers])
    found = np.array([(0, *cut, 48) for cut in combinations(range(1, 48), stages - 1)])
    found = found[np.diff(sizes[found]).max(axis=1) * STATE_BYTES < MEMORY_BYTES / 2]
    ends = found[np.diff(each[found]).max(axis=1).argmin()].tolist()
    cuts = list(pairwise(ends))
    # past the encoder its output goes on beside the decoder's values
    carried = tuple(1024.0 if b <= 24 else 1024.0 * 1.25 for _, b in cuts)
    return RooflinePipeline(tuple(layers[a:b] for a, b in cuts), carried)


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


@dataclass(frozen=True)
class FreeStage:
    """`dcpc.microbatch`'s cost of one stage: nothing is recomputed, and everything fits."""

    model: RooflinePipeline
    stage: int

    def seconds(self, count: Array, longest: Array) -> Array:
        forward_s, back_s, *_ = self.model.figures(self.stage, 0, count, longest)
        return forward_s + back_s

    def peak_bytes(self, count: Array, longest: Array) -> Array:
        return 0.0 * count * longest


def any_split_s(lengths: Sequence[int], cost: RooflinePipeline) -> float:
    """Seconds that no split into micro-batches, and no schedule of one, is below.

    A stage takes at least the sum over the micro-batches of the split that is best for it alone,
    and begins when the stages before it have run a forward, which takes at least what the shortest
    sample takes alone.

    The best split has samples next to each other in length, which `dcpc.microbatch` finds: take
    the micro-batches of any other one in the order of their longest samples and fill them, as
    large as they are, with the samples from the shortest on. No micro-batch gets a longer one:
    those up to it had as many samples, none of which were longer than its longest.
    """
    heads_s, shortest = [0.0], min(lengths)
    for s in range(cost.stages - 1):
        least_s = min(c.forward_s for c in cost.options(s, 1, shortest))
        heads_s.append(heads_s[-1] + least_s + cost.hop(s, 1, shortest).forward_s)
    each = (microbatch(lengths, FreeStage(cost, s)).objective_s for s in range(cost.stages))
    return max(own_s + head_s for own_s, head_s in zip(each, heads_s, strict=True))
