"""Every way to split attention against the plain layer, and what it sends against the formulas."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dcpc.codegen import bind_group
from dcpc.codegen.collectives.collectives import wire_log
from dcpc.commands.check.split import SplitModel
from dcpc.fx.torch_api.torch_collectives import GATHER
from dcpc.passes.sharding.attention_ways import attentions, lowering_of
from dcpc.plan.traced import group_name
from dcpc.runtime.groups.local_ranks import run_ranks
from dcpc.symbolic_profile import evaluator
from dcpc.verify.exactness import LossAndGradients, gradient_errors, loss_error
from dcpc.verify.reference import plain
from tests.exact.attention_counts import ring_bytes, swap_bytes
from tests.exact.attention_layer import BATCH, KINDS, Kind, Layer, buckets, example

ITEM_BYTES = 8  # of float64
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Job:
    """What is run of one layer.

    Attributes:
        kind: a key of `KINDS`.
        worlds: ranks of the groups, ascending.
        lowerings: ways to split its attention.
        lengths: for each world.
    """

    kind: str
    worlds: tuple[int, ...]
    lowerings: tuple[str, ...]
    lengths: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Case:
    """One run of a layer by a group.

    Attributes:
        kind: of the layer.
        p: ranks.
        lowering: of its attention.
        length: of the sequences.
        error: largest relative one of output, loss and all gradients, over all ranks.
        bytes_off: largest difference over the ranks between the bytes handed to torch.distributed
            and the formulas.
        by_profile: whether the profile's formula was one of them.
        sent_bytes: of the rank that sends most.
    """

    kind: str
    p: int
    lowering: str
    length: int
    error: float
    bytes_off: int
    by_profile: bool
    sent_bytes: int

    @property
    def name(self) -> str:
        """What ran, in words."""
        return f"{self.group}, {self.lowering}, length {self.length}"

    @property
    def group(self) -> str:
        """Layer and ranks."""
        return f"{self.kind}, {self.p} ranks"


class Sent:
    """Bytes that a rank hands to torch.distributed for others, in messages and collectives."""

    def __init__(self) -> None:
        self.messages = 0
        self.exchanged = 0
        self.swapped = 0  # of what is exchanged, by hybrids, as the op says itself
        self.collective = Fraction(0)

    @property
    def total(self) -> Fraction:
        """Of all kinds."""
        return self.messages + self.exchanged + self.collective


@contextmanager
def recorded() -> Iterator[Sent]:
    """Counts what is sent in its block, at torch.distributed's own functions.

    A reduction counts as a ring's reduce-scatter and all-gather: 2 (p - 1) / p of its tensor.
    """
    sent = Sent()
    names = ("all_to_all_single", GATHER, "all_reduce", "batch_isend_irecv")
    known = {name: getattr(dist, name) for name in names}

    def all_to_all_single(
        out: Tensor, given: Tensor, takes: Any, gives: list[int], *, group: dist.ProcessGroup
    ) -> Any:
        sent.exchanged += (sum(gives) - gives[group.rank()]) * given.element_size()
        return known["all_to_all_single"](out, given, takes, gives, group=group)

    def all_gather_single(
        out: Tensor, given: Tensor, *, group: dist.ProcessGroup, async_op: bool
    ) -> Any:
        sent.collective += (group.size() - 1) * given.nbytes
        return known[GATHER](out, given, group=group, async_op=async_op)

    def all_reduce(given: Tensor, *, group: dist.ProcessGroup) -> Any:
        sent.collective += Fraction(2 * (group.size() - 1) * given.nbytes, group.size())
        return known["all_reduce"](given, group=group)

    def batch_isend_irecv(ops: list[dist.P2POp]) -> Any:
        sent.messages += sum(op.tensor.nbytes for op in ops if op.op is dist.isend)
        return known["batch_isend_irecv"](ops)

    ours = (all_to_all_single, all_gather_single, all_reduce, batch_isend_irecv)
    for name, function in zip(names, ours, strict=True):
        setattr(dist, name, function)
    try:
        yield sent
    finally:
        for name, function in known.items():
            setattr(dist, name, function)


class Prepared:
    """A layer traced once, lowered for each group, with the plain layer's numbers."""

    def __init__(self, job: Job) -> None:
        self.job, self.kind = job, KINDS[job.kind]
        longest = max(max(lengths) for lengths in job.lengths)
        self.layer = Layer(self.kind, BATCH * longest)
        first = SplitModel(
            self.layer,
            buckets(self.kind, [64, longest]),
            {"batch": BATCH, "seq": longest},
            "eager",
            sp=max(job.worlds),
        )
        self.splits: dict[tuple[int, str], SplitModel] = {}
        for p in job.worlds:
            for lowering in job.lowerings:
                split = first.of("eager", p, lowering)
                if used(split) == {lowering}:
                    self.splits[p, lowering] = split
        self.expected: dict[int, LossAndGradients] = {}
        for lengths in job.lengths:
            for n in lengths:
                if n not in self.expected:
                    self.expected[n] = plain(self.layer, example(self.kind, n))
        for p, lengths in zip(job.worlds, job.lengths, strict=True):
            for split in (s for (q, _), s in self.splits.items() if q == p):
                evaluator(split.study.profile(0))
                for n in lengths:
                    split.ready({"batch": BATCH, "seq": n})


def used(split: SplitModel) -> set[str]:
    """Returns the ways in which a model's attentions are split."""
    return {lowering_of(split.placement.nodes[n.name]) for n in attentions(split.program)}


def run(
    split: SplitModel, length: int, kind: Kind, group: dist.ProcessGroup
) -> tuple[Tensor, Sent]:
    """Returns the loss, with all gradients summed over the group, and what this rank sent."""
    bind_group(group_name(split.sp), group)
    sizes = {"batch": BATCH, "seq": length}
    variant, integers = split.runnable.variant(split.placement, 0, sizes, group.rank())
    inputs = example(kind, length)
    named = {**split.held(), **{p: inputs[n] for p, n in split.program.inputs.items()}}
    split.model.zero_grad()
    wire_log.clear()
    with recorded() as sent:
        loss = variant([named[p] for p in variant.placeholders], integers)
        loss.backward()
    sent.swapped = wire_log.sent_bytes.get("swap", 0)
    gradients = [p.grad for p in split.model.parameters() if p.grad is not None]
    flat = torch.cat([g.reshape(-1) for g in gradients])
    dist.all_reduce(flat, group=group)
    for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))
    return loss.detach(), sent


def bytes_off(
    split: SplitModel, length: int, kind: Kind, lowering: str, rank: int, sent: Sent
) -> tuple[int, bool]:
    """Returns how far what was sent is from the formulas, and whether the profile's is among them.

    The profile's is of even pieces (two from either end where they are zigzag) and of keys that go
    all the way round: it is compared where that is so. Messages of a ring and what a hybrid swaps
    are compared with the exact formulas, at any length.
    """
    p, zigzag = split.sp, bool(split.placement.zigzag)
    off = [0]
    chosen = [split.placement.nodes[n.name] for n in attentions(split.program)]
    if lowering in ("ring", "hybrid"):
        across = chosen[0].across
        key_heads = lcm(kind.key_heads, across) // across if across > 1 else kind.key_heads
        head_bytes = BATCH * kind.width * ITEM_BYTES
        ring = ring_bytes(
            length,
            p,
            rank,
            across=across,
            zigzag=zigzag,
            row_bytes=2 * key_heads * head_bytes,
            before=None if kind.window is None else kind.window - 1,
            after=0 if kind.causal else None,
        )
        off.append(abs(sent.messages - ring))
        if across > 1:
            heads = [kind.heads // across, *(key_heads,) * 2, kind.heads // across]
            swap = swap_bytes(
                length,
                p,
                rank,
                across=across,
                zigzag=zigzag,
                head_bytes=[h * head_bytes for h in heads],
            )
            off.append(abs(sent.swapped - swap))
    even = length % (2 * p if zigzag else p) == 0
    all_round = lowering not in ("ring", "hybrid") or kind.window is None
    by_profile = even and all_round and (lowering != "heads" or even_heads(kind, p))
    if by_profile:
        at = evaluator(split.study.profile(0))
        sizes = split.study.local_sizes({"batch": BATCH, "seq": length}, rank)
        # A reduction of one number is a fraction of bytes: less than one is rounding.
        off.append(int(abs(float(sent.total) - float(at.wire_bytes(sizes)))))
    return max(off), by_profile


def even_heads(kind: Kind, p: int) -> bool:
    """Whether p ranks can share heads, or queries of each key head, evenly."""
    return kind.heads % p == 0 and (
        kind.key_heads % p == 0 or kind.heads // kind.key_heads % p == 0
    )


def on_rank(rank: int, prepared: Prepared) -> list[Case]:
    """Returns this rank's cases; the groups are the first ranks."""
    warnings.simplefilter("ignore")
    found = []
    job = prepared.job
    for p, lengths in zip(job.worlds, job.lengths, strict=True):
        group = dist.new_group(list(range(p)))
        if rank >= p:
            continue
        for (world, lowering), split in prepared.splits.items():
            if world != p:
                continue
            for n in lengths:
                loss, sent = run(split, n, prepared.kind, group)
                expected = prepared.expected[n]
                errors = gradient_errors(prepared.layer, expected.gradients)
                apart = [loss_error(loss, expected.loss), *errors.values()]
                worst = torch.tensor(apart).nan_to_num(float("inf"))
                off, by_profile = bytes_off(split, n, prepared.kind, lowering, rank, sent)
                error, bytes_ = float(worst.max()), int(sent.total)
                found.append(Case(job.kind, p, lowering, n, error, off, by_profile, bytes_))
    return found


def cases_of(job: Job) -> list[Case]:
    """Returns the cases of one layer, of all ranks the worse one."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    prepared = Prepared(job)
    ranks = run_ranks(on_rank, max(job.worlds), prepared, timeout_s=TIMEOUT_S, fork=True)
    worst: dict[str, Case] = {}
    for case in (case for mine in ranks for case in mine):
        known = worst.get(case.name, case)
        worst[case.name] = replace(
            case,
            error=max(case.error, known.error),
            bytes_off=max(case.bytes_off, known.bytes_off),
            sent_bytes=max(case.sent_bytes, known.sent_bytes),
        )
    return list(worst.values())


def drawn_lengths(p: int, count: int, longest: int) -> tuple[int, ...]:
    """Returns lengths from 1 on: less than the ranks, multiples of them and others."""
    fixed = {1, p - 1, p + 1, 8 * p, longest // (2 * p) * 2 * p, longest}
    generator = torch.Generator().manual_seed(p)
    more = torch.randint(1, longest + 1, (max(0, count - len(fixed)),), generator=generator)
    return tuple(sorted({n for n in (*fixed, *more.tolist()) if n > 0}))


def saved_by_ranks(ranks: Sequence[int], length: int) -> Mapping[int, int]:
    """Returns the bytes that the first of so many ranks keeps for backward, split as a ring."""
    kind = KINDS["4 heads, causal"]
    layer = Layer(kind, BATCH * length)
    sizes = {"batch": BATCH, "seq": length}
    first = SplitModel(layer, buckets(kind, [64, length]), sizes, "eager", max(ranks), "ring")
    found = {}
    for p in ranks:
        split = first.of("eager", p, "ring")
        at = evaluator(split.study.profile(0))
        found[p] = int(at.saved_bytes(split.study.local_sizes(sizes)))
    return found
