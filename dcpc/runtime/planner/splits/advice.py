"""Advice on padding: its cost in words, and buckets that would leave less of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd

from dcpc.buckets import Bucket, tokens_of
from dcpc.buckets.choosing import DEFAULT_PADDING, best_shapes, padded_cost
from dcpc.runtime.planner.own_lengths import Dims, OwnLengths

# Other buckets are told where they leave at most this share of the padding; what sizes told are
# multiples of, if those of all buckets are.
_WORTH_TELLING, _LARGEST_STEP = 0.8, 64


def padding_advice(
    share: float,
    buckets: Sequence[Bucket],
    counts: Mapping[Dims, int],
    own: OwnLengths | None = None,
) -> str:
    """Returns the cost of padding and buckets with less of it; "": little, or none have.

    Args:
        share: fraction of the tokens run that are padding.
        buckets: buckets in use.
        counts: samples of each combination of lengths.
        own: lengths that samples are padded to alone; None: their buckets.
    """
    if share <= DEFAULT_PADDING or not counts:
        return ""
    if own is not None and (alone := _padding_alone(own, buckets, counts)) <= DEFAULT_PADDING:
        return (
            f"got padding of {share:.1%} of the tokens that ran, {alone:.1%} if each sample ran by "
            "itself: samples share micro-batches with longer ones, as more micro-batches are "
            "predicted to take longer; steps of more samples (tokens_per_step=) have more of like "
            "length, and packing= pads next to nothing"
        )
    names = [name for name, _ in buckets[0].shape_key]
    steps = [gcd(_LARGEST_STEP, *(b[name] for b in buckets)) for name in names]
    shapes = {tuple(size for _, size in sorted(dims)): n for dims, n in counts.items()}
    tokens = sum(n * tokens_of(shape) for shape, n in shapes.items())
    told: list[str] = []
    for most, padding in ((len(buckets), None), (None, DEFAULT_PADDING)):
        chosen = best_shapes(shapes, steps, most, padding)
        if chosen is None:
            continue
        left = 1 - tokens / padded_cost(shapes, chosen.shapes, tokens_of)  # of lengths as they are
        if left < share * _WORTH_TELLING:
            every = [dict(zip(names, shape, strict=True)) for shape in chosen.shapes]
            shown = f": {', '.join(map(str, every[:8]))}" + ", ..." * (len(every) > 8)
            found = f"{left:.1%}" if told else f"{left:.1%}{shown}"
            told.append(f"{len(every)} {'' if told else 'others '}would leave {found}")
    text = f"got padding of {share:.1%} of the tokens that ran in {len(buckets)} buckets; "
    advice = "Buckets.from_lengths(inputs, lengths, count=) chooses them"
    return text + "; ".join([*told, advice]) if told else ""


def _padding_alone(own: OwnLengths, buckets: Sequence[Bucket], counts: Mapping[Dims, int]) -> float:
    """Returns padding's share if each sample were a micro-batch."""
    ascending = sorted(buckets, key=lambda b: (b.tokens, b.shape_key))
    tokens = padded = 0
    for dims, count in counts.items():
        home = next(b for b in ascending if all(n <= b[name] for name, n in dims))
        tokens += count * tokens_of(n for _, n in dims)
        padded += count * tokens_of(n for _, n in own.padded(home, tuple(sorted(dims))))
    return 1 - tokens / padded
