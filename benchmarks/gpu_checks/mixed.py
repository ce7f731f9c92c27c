"""Tokens a second on texts of very different lengths: dcpc, padding, and packing.

    dcpc      the loader's steps: a micro-batch and a recompute for each length, one rank; samples
              are padded to their buckets, or to the longest of their micro-batch, or packed
    padding   the plain model on the same samples, sorted by length, as many as fit into `CAP`
              tokens with their padding
    packing   the plain model's layers on rows of up to `CAP` tokens, best fit first, attention by
              torch's flash kernel of variable lengths (a CPU: sample by sample)

All three run eager, forward and backward, no optimizer, from the same weights; their losses are
compared. Lengths are of Wikipedia articles in `../shared/data`, or drawn from their published
quantiles where that is not there; longer ones than `CAP` are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.utils.rnn import pad_sequence

import dcpc
from benchmarks.gpu_checks.costs import rounds
from benchmarks.gpu_checks.machine import Machine
from benchmarks.gpu_checks.rows import Row, Setting, not_run, tried
from benchmarks.gpu_checks.subjects import GPT_1B, GPT_TINY, TEXT, drawn_tokens
from benchmarks.lengths import SHARED, generate, read
from dcpc.buckets import BATCH, Sizes
from dcpc.commands.calibrate import calibrate
from dcpc.commands.simulate.packers import best_fit
from dcpc.runtime.data.steps import Step
from dcpc.symbolic_profile import Calibration
from dcpc.symbolic_profile.seconds.hardware import detect
from models.gpt import GPT, Attention, GPTConfig, rope_tables, rotate

IGNORE = -100
PACKED = dict.fromkeys(("input_ids", "position_ids", "segment_ids", "labels"), "int64[batch, seq]")
# Largest relative difference of two systems' losses of all steps.
LOSS_OFF = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@dataclass(frozen=True, slots=True)
class Amount:
    """How much is run.

    Attributes:
        config: of the GPT.
        cap: tokens of the longest sample, of a padded batch and of a packed row.
        least: tokens of the smallest bucket.
        shrink: by which lengths are divided.
        step_tokens: of a global batch.
        steps: of a round.
        budget_s: seconds of the calibration's measurements.
    """

    config: GPTConfig
    cap: int
    least: int
    shrink: int
    step_tokens: int
    steps: int
    budget_s: float

    def buckets(self, inputs: Mapping[str, str]) -> dcpc.Buckets:
        """Returns two lengths an octave, the longest last."""
        lengths, size = [self.cap], self.cap // 2
        while size >= self.least:
            lengths += [3 * size // 2, size]
            size //= 2
        return dcpc.Buckets(dict(inputs), [{"seq": n} for n in sorted(lengths)])


CARD = Amount(GPT_1B, 32_768, 64, 1, 65_536, 2, 6.0)
SMALL = Amount(GPT_TINY, 512, 8, 64, 2048, 1, 1.0)


class Texts:
    """Random tokens of given lengths, drawn when they are asked for."""

    def __init__(self, lengths: Sequence[int], vocabulary: int) -> None:
        self.lengths, self.vocabulary = lengths, vocabulary

    def __len__(self) -> int:
        return len(self.lengths)

    def dims(self, index: int) -> dict[str, int]:
        """Returns the length of a text."""
        return {"seq": self.lengths[index]}

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        drawn = torch.Generator().manual_seed(index)
        row = torch.randint(self.vocabulary, (self.lengths[index] + 1,), generator=drawn)
        return {"input_ids": row[:-1], "labels": row[1:]}


class PackableGPT(GPT):
    """The GPT with positions, and rows of several texts that do not see each other."""

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, position_ids: Tensor, segment_ids: Tensor, labels: Tensor
    ) -> Tensor:
        """Returns the mean loss over the labels that are not ignored."""
        x, length = self.embedding(input_ids), input_ids.shape[1]
        width, device = self.config.head_dim, x.device
        powers = torch.arange(0, width, 2, device=device, dtype=torch.float32) / width
        angles = position_ids[:, None, :, None].float() * self.config.rope_theta**-powers
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        own = segment_ids[:, :, None] == segment_ids[:, None, :]
        causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        mask = (own & causal).unsqueeze(1)
        for block in self.blocks:
            x = x + _masked(block.attention, block.attention_norm(x), cos, sin, mask)
            x = x + block.ffn(block.ffn_norm(x))
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)


def _masked(layer: Attention, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (
        p(x).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)
        for p in (layer.q, layer.k, layer.v)
    )
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return layer.out(out.transpose(1, 2).flatten(2))


class Padded:
    """The plain model on padded batches."""

    def __init__(self, model: GPT, texts: Texts, cap: int, device: torch.device) -> None:
        self.model, self.texts, self.cap, self.device = model, texts, cap, device

    def batches(self, samples: Sequence[int]) -> list[list[int]]:
        """Returns samples in batches, longest first."""
        found: list[list[int]] = []
        for i in sorted(samples, key=lambda i: -self.texts.lengths[i]):
            if found and self.texts.lengths[found[-1][0]] * (len(found[-1]) + 1) <= self.cap:
                found[-1].append(i)
            else:
                found.append([i])
        return found

    def run(self, samples: Sequence[int]) -> float:
        """Adds the gradient of the samples' mean loss; returns that loss."""
        total, tokens = 0.0, sum(self.texts.lengths[i] for i in samples)
        for batch in self.batches(samples):
            rows = [self.texts[i] for i in batch]
            ids = pad_sequence([r["input_ids"] for r in rows], True, 0).to(self.device)
            labels = pad_sequence([r["labels"] for r in rows], True, IGNORE).to(self.device)
            share = sum(self.texts.lengths[i] for i in batch) / tokens
            loss = share * self.model(ids, labels)
            loss.backward()
            total += float(loss.detach())
        return total


class Packed:
    """The plain model's layers on rows of texts end to end, attention inside each text alone."""

    def __init__(self, model: GPT, texts: Texts, cap: int, device: torch.device) -> None:
        self.model, self.texts, self.cap, self.device = model, texts, cap, device

    def run(self, samples: Sequence[int]) -> float:
        """Adds the gradient of the samples' mean loss; returns that loss."""
        lengths = [self.texts.lengths[i] for i in samples]
        total, tokens = 0.0, sum(lengths)
        for row in best_fit(lengths, self.cap):
            loss = self._loss_sum([samples[i] for i in row]) / tokens
            loss.backward()
            total += float(loss.detach())
        return total

    def _loss_sum(self, samples: Sequence[int]) -> Tensor:
        rows, model = [self.texts[i] for i in samples], self.model
        lengths = [len(r["labels"]) for r in rows]
        ids, labels = (torch.cat([r[n] for r in rows]).to(self.device) for n in TEXT)
        ends = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int().to(self.device)
        positions = torch.cat([torch.arange(n) for n in lengths]).to(self.device)
        x = model.embedding(ids)  # [tokens, width]
        longest = x.new_empty(1, max(lengths), 1)
        tables = rope_tables(longest, model.config.head_dim, model.config.rope_theta)
        cos, sin = (table[positions] for table in tables)
        for block in model.blocks:
            x = x + self._attend(block.attention, block.attention_norm(x), cos, sin, ends, lengths)
            x = x + block.ffn(block.ffn_norm(x))
        return F.cross_entropy(model.head(model.norm(x)), labels, reduction="sum")

    def _attend(
        self,
        layer: Attention,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        ends: Tensor,
        lengths: Sequence[int],
    ) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (-1, layer.head_dim)).transpose(0, 1)
            for p in (layer.q, layer.k, layer.v)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.device.type == "cpu":
            parts = zip(*(t.split(lengths, dim=1) for t in (q, k, v)), strict=True)
            each = [F.scaled_dot_product_attention(*part, is_causal=True) for part in parts]
            return layer.out(torch.cat(each, dim=1).transpose(0, 1).flatten(1))
        q, k, v = (t.transpose(0, 1).contiguous() for t in (q, k, v))
        longest = max(lengths)
        out = varlen_attn(q, k, v, ends, ends, longest, longest, window_size=(-1, 0))
        return layer.out(out.flatten(1))


def mixed(setting: Setting) -> Iterator[Row]:
    """Yields tokens a second of each system, MFU and padding."""
    yield from tried("mixed lengths", lambda: _race(setting, CARD if setting.card else SMALL))


def _race(setting: Setting, amount: Amount) -> Iterator[Row]:
    machine, dtype = Machine(setting.device), setting.dtypes[-1]
    texts, origin = _texts(amount)
    torch.manual_seed(0)
    with setting.device:
        model = PackableGPT(amount.config).to(dtype)
        plain = GPT(amount.config).to(dtype)
    plain.load_state_dict(model.state_dict(keep_vars=True), assign=True)  # the same parameters
    options = {
        "backend": "eager", "verify": "off", "device": machine.target,
        "memory": 0.9 * machine.memory_bytes if setting.card else 400e6,
    }  # fmt: skip
    padding, packing = (
        dcpc.compile(
            given, amount.buckets(inputs), calibration=_calibrated(given, inputs, amount), **options
        )
        for given, inputs in ((plain, TEXT), (model, PACKED))
    )
    ways: dict[str, tuple[dcpc.CompiledModel, dict[str, Any]]] = {
        "dcpc": (padding, {"pad_to": "bucket"}),
        "dcpc, own lengths": (padding, {"pad_to": "longest"}),
        "dcpc, packing": (packing, {"packing": "segment_ids"}),
    }
    ours = {name: _steps(texts, amount, *way) for name, way in ways.items()}
    steps = ours["dcpc"]
    samples = [sorted({i for mb in step.micro_batches for i in mb.samples}) for step in steps]
    padded, packed = (kind(plain, texts, amount.cap, setting.device) for kind in (Padded, Packed))
    systems: dict[str, Callable[[], list[float]]] = {
        **{name: partial(_trained, ways[name][0], mine) for name, mine in ours.items()},
        "padding": lambda: [padded.run(step) for step in samples],
        "packing": lambda: [packed.run(step) for step in samples],
    }

    def clear() -> None:
        model.zero_grad(set_to_none=True)

    losses = {}
    for name, run in systems.items():
        clear()
        losses[name] = run()
        machine.clear()
    for name in losses.keys() - {"dcpc"}:
        pairs = zip(losses[name], losses["dcpc"], strict=True)
        off = max(abs(a / b - 1) if b else 0.0 for a, b in pairs)
        limit = LOSS_OFF[dtype]
        yield setting.judged(f"loss, {name} and dcpc", off < limit, error=off, limit=limit)
    spent = machine.medians_s(list(systems.values()), rounds(setting), clear)
    lengths = [texts.lengths[i] for step in samples for i in step]
    yield from _rates(setting, model, dtype, dict(zip(systems, spent, strict=True)), lengths)
    yield setting.measured(
        "mixed lengths, data", texts=len(lengths), tokens=sum(lengths), longest=max(lengths),
        lengths_are=origin, **{f"padding_of_{name}": _padding(mine) for name, mine in ours.items()},
        **{f"micro_batches_of_{name}": _runs(mine) for name, mine in ours.items()},
        **{f"predicted_s_of_{name}": _predicted_s(mine) for name, mine in ours.items()},
    )  # fmt: skip


def _calibrated(model: GPT, inputs: Mapping[str, str], amount: Amount) -> Calibration:
    lengths = dcpc.Buckets(dict(inputs), [{"seq": amount.cap >> i} for i in (2, 4, 6, 8)])
    example = partial(_example, inputs, amount.config.vocab_size)
    return calibrate(model, lengths, backend="eager", example=example, budget_s=amount.budget_s)


def _example(inputs: Mapping[str, str], vocabulary: int, sizes: Sizes) -> dict[str, Tensor]:
    batch, length = sizes[BATCH], sizes["seq"]
    made = drawn_tokens(vocabulary, sizes)
    counted = torch.arange(length).expand(batch, -1).contiguous()
    made |= {"position_ids": counted, "segment_ids": torch.ones_like(counted)}
    return {name: made[name] for name in inputs}


def _steps(
    texts: Texts, amount: Amount, compiled: dcpc.CompiledModel, own: dict[str, Any]
) -> list[Step]:
    pad = {"input_ids": 0, "labels": IGNORE}
    options = {"tokens_per_step": amount.step_tokens, "pad": pad, "weight": "labels"}
    return list(islice(dcpc.DataLoader(texts, compiled, **options, **own), amount.steps))


def _trained(compiled: dcpc.CompiledModel, steps: Sequence[Step]) -> list[float]:
    return [float(compiled.train_step(step).loss) for step in steps]


def _rates(
    setting: Setting,
    model: GPT,
    dtype: torch.dtype,
    spent: dict[str, float],
    lengths: Sequence[int],
) -> Iterator[Row]:
    for name, seconds_s in spent.items():
        rate = {"tokens_per_s": sum(lengths) / seconds_s, "seconds_s": seconds_s}
        yield setting.measured(f"mixed lengths, {name}", **rate)
        if not setting.card:
            yield not_run(f"mixed lengths, {name}, MFU")
            continue
        peak = detect().matmul_flops_per_s(dtype)
        share = model_flops(model, lengths) / seconds_s / peak
        yield setting.measured(f"mixed lengths, {name}, MFU", mfu=share, of_flops_per_s=peak)


def model_flops(model: GPT, lengths: Sequence[int]) -> float:
    """Returns the FLOPs of forward and backward of texts: no recompute, no padding.

    Two for each weight of a matmul and token, and of causal attention two products over half of all
    pairs; backward takes twice that.
    """
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    weights = matrices - model.embedding.weight.numel()
    config = model.config
    pairs = sum(n * (n + 1) / 2 for n in lengths)
    attention = 4.0 * config.dim * config.n_layers * pairs
    return 3.0 * (2.0 * weights * sum(lengths) + attention)


def _texts(amount: Amount) -> tuple[Texts, str]:
    """Returns texts of real lengths, and where these are from."""
    there = SHARED.exists()
    batches = read(SHARED) if there else generate()
    batch = next(b for b in batches if b.family == "wikipedia_192k")
    lengths = [max(2, n // amount.shrink) for n in batch.lens]
    kept = [n for n in lengths if n <= amount.cap]
    return Texts(kept, amount.config.vocab_size), f"{batch.name}{'' if there else ', drawn'}"


def _runs(steps: Sequence[Step]) -> int:
    """Returns how many micro-batches steps have."""
    return sum(len(step.micro_batches) for step in steps)


def _predicted_s(steps: Sequence[Step]) -> float:
    """Returns what the plans say of all steps."""
    return sum(step.plan.makespan_s for step in steps)


def _padding(steps: Sequence[Step]) -> float:
    """Returns the share of dcpc's tokens that is padding."""
    ran = sum(mb.inputs["labels"].numel() for step in steps for mb in step.micro_batches)
    return 1 - sum(step.tokens for step in steps) / ran
