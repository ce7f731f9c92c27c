"""Tries whether a rule of an autograd function holds in its backward, too.

    pieces    the gradient of an operand's piece is the piece of its gradient; operands that every
              rank has whole get parts of their gradient that add up
    sums      b(g + h) = b(g) + b(h): ranks that all make the call may each have a part of g

A backward of a model's own may do anything: clip each element (pieces hold, sums do not) or divide
by the norm of the whole gradient (neither does).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from dcpc.passes.sharding.op_trial import Dims, Trial, TrialSample, close
from dcpc.passes.sharding.operand_draws import draw

_DRAWN = 6  # samples that are taken
_KINDS = (0, 2, 11)  # gradients: normal, few distinct numbers, an outlier among zeros


def splits_backward(
    trial: Trial, samples: Sequence[TrialSample], dims: Dims, along: int | None
) -> bool:
    """Returns whether the backward of pieces is the backward of the whole.

    Args:
        trial: call that is tried.
        samples: draws of its operands.
        dims: dims of the operands that are cut.
        along: dim of the result that is cut; None: the pieces' results add up.
    """
    for sample, (gradient,) in _drawn(trial, samples, 1):
        whole = _gradients(trial, sample, sample.operands, gradient)
        for borders in trial.cuts(sample.operands[dims[0][0]].shape[dims[0][1]]):
            parts: dict[int, list[Tensor]] = {}
            for start, stop in pairwise(borders):
                cut, own = list(sample.operands), list(gradient)
                for i, d in dims:
                    cut[i] = cut[i].narrow(d, start, stop - start).contiguous()
                if along is not None:
                    tangent = own[trial.result].narrow(along, start, stop - start)
                    own[trial.result] = tangent.contiguous()
                found = _gradients(trial, sample, cut, own)
                if whole is None or found is None:
                    return False
                for i, part in enumerate(found):
                    parts.setdefault(i, []).append(part)
            if whole is None or not _is_whole(trial, parts, whole, dict(dims)):
                return False
    return True


def adds_up(trial: Trial, samples: Sequence[TrialSample]) -> bool:
    """Returns whether the backward of a sum of gradients, of all results, is a sum of backwards."""
    for sample, (one, other) in _drawn(trial, samples, 2, every=True):
        total = [a + b for a, b in zip(one, other, strict=True)]
        found = [_gradients(trial, sample, sample.operands, g) for g in (one, other, total)]
        each = zip(*(f for f in found if f is not None), strict=True)
        if any(f is None for f in found):
            return False
        if not all(close(a + b, ab, a.abs() + b.abs(), trial.exact) for a, b, ab in each):
            return False
    return True


def _is_whole(
    trial: Trial, parts: dict[int, list[Tensor]], whole: list[Tensor], cut: dict[int, int]
) -> bool:
    for i, want in enumerate(whole):
        scale = want.abs()
        if i in cut:
            got = torch.cat(parts[i], cut[i])
        else:
            got = torch.stack(parts[i]).sum(0)
            scale = torch.stack(parts[i]).abs().sum(0)
        scale = scale + scale.max() / 100 if scale.numel() else scale
        if not close(got, want, scale, trial.exact):
            return False
    return True


def _drawn(
    trial: Trial, samples: Sequence[TrialSample], count: int, every: bool = False
) -> Iterator[tuple[TrialSample, list[list[Tensor]]]]:
    """Yields samples with `count` gradients each of one result, zeros of others, or of all."""
    finite = [s for s in samples if all(bool(x.isfinite().all()) for x in s.operands)]
    for sample in finite[:: max(1, len(finite) // _DRAWN)]:
        results = trial.results(sample.operands, sample.sizes)
        for kind in _KINDS:
            found = []
            for seed in range(count):
                shapes = [tuple(y.shape) for y in results]
                drawn = draw(kind, shapes, [torch.float64] * len(shapes), 17 + seed)
                pairs = enumerate(zip(drawn, results, strict=True))
                own = [(g if every or i == trial.result else 0 * g, y) for i, (g, y) in pairs]
                found.append([(3 * g).to(y) for g, y in own])
            yield sample, found


def _gradients(
    trial: Trial, sample: TrialSample, operands: Sequence[Tensor], gradient: Sequence[Tensor]
) -> list[Tensor] | None:
    """Returns the gradient of each operand that is of numbers; None if the op refuses."""
    given = [x.detach().clone() for x in operands]
    learning = [x.requires_grad_() for x in given if x.is_floating_point()]
    try:
        with torch.inference_mode(False), torch.enable_grad():
            results = trial.results(given, sample.sizes)
            pairs = [(y, g) for y, g in zip(results, gradient, strict=True) if y.requires_grad]
            outputs, tangents = zip(*pairs, strict=True)
            found = torch.autograd.grad(outputs, learning, tangents, allow_unused=True)
    except Exception:  # any error of a user's function: it does not accept these operands
        return None
    numbers = iter(found)
    each = [next(numbers) if x.requires_grad else None for x in given]
    return [torch.zeros_like(x) if g is None else g for x, g in zip(given, each, strict=True)]
