"""`dcpc check`: the verdict on a user's own model, from ranks of its own or from torchrun's."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from dcpc.buckets import BATCH, Bucket, Buckets, Sizes
from dcpc.commands.check.verdict import Verdict, compare, prepare, refuse_untraced
from dcpc.commands.shared.factories import load_example, load_loss, load_model, with_loss
from dcpc.errors import BucketError, PlanError
from dcpc.plan.progress_bar import during
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.groups.local_ranks import run_ranks
from dcpc.verify.exactness import EXACT

RANKS_ALONE = 2
MOST_SHOWN = 12


@dataclass(frozen=True, slots=True)
class CheckRequest:
    """Arguments of `dcpc check`.

    Attributes:
        factory: `module:factory` of the model.
        file: file of the buckets.
        sp: ranks; 0: two without torchrun, all of torchrun's with it.
        example: `module:function` that makes the inputs, or None.
        at: shapes to compare at; (): near the smallest bucket.
        attention: way to split attention, see `passes/sharding/attention_ways.py`.
        loss: `module:function` that returns the loss of the model's outputs, or None.
    """

    factory: str
    file: str
    sp: int = 0
    example: str | None = None
    at: tuple[Mapping[str, int], ...] = ()
    attention: str = "auto"
    loss: str | None = None


def check_model(request: CheckRequest, timeout_s: float) -> tuple[str, bool]:
    """Returns the verdicts as text, and whether the model is accepted.

    Raises:
        DcpcError: the file, the factory or a shape is wrong, or a rank failed or did not end.
    """
    _shapes(request, Buckets.from_yaml(request.file))  # before any rank starts
    with during(f"make {request.factory}"):
        load_model(request.factory)
    load_loss(request.loss)
    load_example(request.example)
    if "RANK" not in os.environ:
        sp = request.sp or RANKS_ALONE
        with during(f"trace, and compare on {sp} ranks"):
            found = run_ranks(on_rank, sp, request, timeout_s=timeout_s)[0]
        return verdicts_text(request, found), all(v.accepted for v in found)
    groups = Groups.default(timeout_s=timeout_s)
    if request.sp not in (0, groups.world):
        raise PlanError(
            f"got --sp {request.sp} on {groups.world} ranks; expected {groups.world}, as the whole "
            "group is checked; leave --sp out, or start that many ranks"
        )
    with during(f"trace, and compare on {groups.world} ranks"):
        found = on_rank(groups.rank, request)
    accepted = all(v.accepted for v in found)
    return (verdicts_text(request, found) if groups.rank == 0 else ""), accepted


def on_rank(rank: int, request: CheckRequest) -> list[Verdict]:
    """Returns a verdict for each trace that the buckets need; every rank calls this."""
    sp = dist.get_world_size() if dist.is_initialized() else 1
    buckets = Buckets.from_yaml(request.file)
    example = load_example(request.example)
    loss = load_loss(request.loss)

    def make() -> nn.Module:
        return with_loss(load_model(request.factory), loss, buckets.inputs)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is replicated is in the verdict
        each = prepare(
            make, buckets, _shapes(request, buckets), sp, example=example,
            recomputes=("none", "all"), attention=(request.attention,),
        )  # fmt: skip
        return [one if isinstance(one, Verdict) else compare(one) for one in each]


def _shapes(request: CheckRequest, buckets: Buckets) -> Sequence[Sizes]:
    """Returns the shapes to compare at, as asked for.

    Raises:
        BucketError: a shape has other dims, or lengths that no trace of the buckets is for.
    """
    found = []
    for given in request.at:
        sizes = {BATCH: 1, **given} if BATCH in buckets.names else dict(given)
        if sizes.keys() != set(buckets.names):
            raise BucketError(
                f"got --at {dict(given)}; expected a length for each of "
                f"{', '.join(n for n in buckets.names if n != BATCH)}; correct it"
            )
        found.append(sizes)
    refuse_untraced(buckets, found)
    return found


def verdicts_text(request: CheckRequest, found: Sequence[Verdict]) -> str:
    """Returns a block of lines for each trace, and the verdict as the last line."""
    lines = [line for verdict in found for line in _lines(verdict)]
    accepted = bool(found) and all(v.accepted for v in found)
    lines.append(f"{request.factory}: {'accepted' if accepted else 'NOT accepted'}")
    return "\n".join(lines) + "\n"


def _lines(v: Verdict) -> Iterator[str]:
    if v.error:
        yield v.error
        return
    yield f"traced in {v.trace_s:.1f} s: {v.nodes} values; symbolic: {', '.join(v.symbolic) or '-'}"
    yield from v.static
    if v.coverage is not None:
        c = v.coverage
        yield (
            f"split over {v.sp} ranks: {c.sharded_share:.1%} of the FLOPs, the fullest rank has "
            f"{c.rank_share:.1%} at {Bucket.of(c.sizes)}; {c.collectives} collectives in "
            "forward"
        )
        yield from _unsplit_lines(v)
    for d in v.differences:
        yield (
            f"{Bucket.of(d.sizes)}: loss differs by {d.loss:.1e}, gradients by "
            f"{d.gradient:.1e} ({d.parameter}), recompute {d.recompute}"
        )
    if v.low:
        yield f"it computes parts in {v.low}: limit {v.limit:.1e} as it is, {EXACT:.0e} in float64"
    for d in v.lifted:
        yield f"{Bucket.of(d.sizes)} in float64 throughout: differs by {d.worst:.1e}"
    for text in v.skipped:
        yield f"not compared, as the model itself refuses it: {text}"
    for problem in v.problems():
        yield f"problem: {problem}"


def _unsplit_lines(v: Verdict) -> Iterator[str]:
    assert v.coverage is not None
    whole = [u for u in v.coverage.unsplit if not u.blocked]
    if whole:
        yield f"{len(whole)} values made in whole on every rank, by choice:"
    yield from (f"  {u}" for u in whole[:MOST_SHOWN])
    if len(whole) > MOST_SHOWN:
        yield f"  and {len(whole) - MOST_SHOWN} more"
