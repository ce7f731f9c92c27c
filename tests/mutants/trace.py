"""Faults of what is captured: canonical forms, losses, spellings, random numbers, masks."""

from __future__ import annotations

from functools import partial

from tests.mutants.plant import Mutant, edited

_trace = partial(Mutant, phase="trace")
_mask = partial(Mutant, phase="masks", setting="marked")

TRACE = [
    _trace("a mean counts one of its dims", setting="sound", quick=True, plant=edited(
        "trace.canonical.editor:Editor.mean",
        "self.sizes(source, dims))", "self.sizes(source, dims[-1:]))")),
    _trace("a batch norm adds its mean", setting="sound", plant=edited(
        "trace.canonical.canonical:_batch_norm", "aten.sub.Tensor", "aten.add.Tensor")),
    _trace("a batch norm without epsilon", setting="sound", plant=edited(
        "trace.canonical.canonical:_batch_norm", "edit.call(aten.add.Scalar, column[\"var\"], eps)",
        "column[\"var\"]")),
    _trace("pieces of a chunk exchanged", setting="gpt", quick=True, plant=edited(
        "trace.canonical.canonical:_split", "index: Any = user.args[1]",
        "index: Any = {0: 1, 1: 0}.get(user.args[1], user.args[1])")),
    _trace("rows of a patch in another order", setting="sound", plant=edited(
        "trace.canonical.patches:patch_convolution",
        "[0, *windows, 1, *inside]", "[0, *windows, *inside, 1]")),
    _trace("a sum of losses is their mean", setting="sums", plant=edited(
        "trace.canonical.losses:_one_by_one", "mean=bool(reduction == MEAN)", "mean=True")),
    _trace("a mean of losses is their sum", setting="sums", plant=edited(
        "trace.canonical.losses:_added", " if mean else ", " if False else ")),
    _trace("ignored labels are counted", setting="gpt", quick=True, plant=edited(
        "trace.canonical.losses:_reduced", "edit.call(aten.ne.Scalar, flat, ignored)",
        "edit.call(aten.ne.Scalar, flat, ignored - 1)")),
    _trace("a summed cross-entropy is a mean", setting="padded", plant=edited(
        "trace.canonical.losses:_cross_entropy",
        "_reduced(edit, rows, target, weight, reduction, ignored)",
        "_reduced(edit, rows, target, weight, MEAN, ignored)")),
    _trace("label smoothing lost", setting="shifted", plant=edited(
        "trace.canonical.losses:_cross_entropy",
        "weight, 0, ignored, smoothing", "weight, 0, ignored, 0.0")),
    _trace("weights of classes not summed", setting="spelled", plant=edited(
        "trace.canonical.losses:_reduced", "total(weights, SUM)", "total(weights, MEAN)")),
    _trace("copies one after the other, not side by side", setting="sums", plant=edited(
        "trace.canonical.spellings:repeat_interleave", "outer=False", "outer=True")),
    _trace("copies side by side, not one after the other", setting="sums", quick=True, plant=edited(
        "trace.canonical.spellings:repeat", "outer=True", "outer=False")),
    _trace("another scale of attention", setting="gpt", quick=True, plant=edited(
        "trace.canonical.attention:_emit", "else found.scale}", "else 0.9}")),
    _trace("attention forgets that it is causal", setting="gpt", plant=edited(
        "trace.canonical.attention:_fused",
        "causal=bool(given.get(\"is_causal\"))", "causal=False")),
    _trace("causal attention sees one key too many", setting="gpt", plant=edited(
        "trace.canonical.attention:_emit", "kwargs[\"after\"] = 0", "kwargs[\"after\"] = 1")),
    _trace("scores are multiplied where they are divided", setting="spelled", plant=edited(
        "trace.canonical.attention:_steps", "1 / factor if divides else factor", "factor")),
    _trace("a fill hides what it shows", setting="spelled", plant=edited(
        "trace.canonical.attention:_fill", "aten.masked_fill.Scalar: (0, 1, 2, False)",
        "aten.masked_fill.Scalar: (0, 1, 2, True)")),
    _trace("dropout scales by p", setting="dropout", quick=True, plant=edited(
        "trace.canonical.seeded:_kept", "1.0 / (1.0 - p)", "1.0 / p")),
    _trace("dropout keeps what it drops", setting="dropout", plant=edited(
        "trace.canonical.seeded:_kept", "aten.ge.Scalar", "aten.lt.Scalar")),
    _trace("what is dropped stays", setting="dropout", plant=edited(
        "trace.canonical.seeded:_kept", "kept, scaled, zero)", "kept, scaled, x)")),
    _trace("attention to one key is the key", setting="video", plant=edited(
        "trace.canonical.single_key:attention_of_one_key",
        "tuple(map(str, value.shape)):\n        return v",
        "tuple(map(str, value.shape)):\n        return k")),
    _trace("another part of a projection", setting="video", quick=True, plant=edited(
        "trace.canonical.single_key:_narrow_slice",
        "_rows(linear, start, stop)", "_rows(linear, 0, stop - start)")),
]  # fmt: skip

MASKS = [
    _mask("a limit is one key too wide", quick=True, plant=edited(
        "passes.masks.masks:_Mask._limit", "int(number) // abs(coefficients[\"i\"])",
        "int(number) // abs(coefficients[\"i\"]) + 1")),
    _mask("a limit is one key too narrow", plant=edited(
        "passes.masks.masks:_Mask._limit", "int(number) // abs(coefficients[\"i\"])",
        "int(number) // abs(coefficients[\"i\"]) - 1")),
    _mask("before and after exchanged", quick=True, plant=edited(
        "codegen.lower.masks:apply_masks",
        "{\"before\": decision.before, \"after\": decision.after}",
        "{\"before\": decision.after, \"after\": decision.before}")),
    _mask("padding lost", plant=edited(
        "passes.masks.masks:_Mask.decide", "band.after, band.keep,", "band.after, None,")),
    _mask("packed sequences see each other", plant=edited(
        "passes.masks.masks:_Mask.decide", "empty, band.segment)", "empty, None)")),
    _mask("a window without a beginning", plant=edited(
        "passes.masks.masks:_Mask.decide", "MaskDecision(band.before,", "MaskDecision(None,")),
    _mask("a window without an end", plant=edited(
        "passes.masks.masks:_Mask.decide",
        "MaskDecision(band.before, band.after,", "MaskDecision(band.before, None,")),
    _mask("a row that sees nothing gets the mean", plant=edited(
        "passes.masks.masks:_Mask.decide", "band.keep, empty,", "band.keep, \"mean\",")),
    _mask("not less than is more than", plant=edited(
        "passes.masks.mask_values:negation", "Affine(-1)))", "Affine(0)))")),
    _mask("a conjunction of two terms of four", plant=edited(
        "passes.masks.mask_values:_joined", "dict.fromkeys(found))",
        "[*dict.fromkeys(found)][: 2 if kind == \"all\" else None])")),
    _mask("the causal limit is one key too wide", setting="padded", plant=edited(
        "passes.masks.masks:_Mask._limit",
        "band.limit(after=limit)", "band.limit(after=limit + 1)")),
]  # fmt: skip
