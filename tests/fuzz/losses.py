"""Terms of the loss."""

# ruff: noqa: E501 - a line of source a template

from __future__ import annotations

from collections.abc import Callable

from tests.fuzz.draw import B, Draw, H, Value, W

CLASSES = 5  # as many as there are integers in the inputs


def term(d: Draw, v: Value) -> None:
    """Adds a term of a value."""
    rows = v.ndim == 3 and v.shape[0] == B and v.shape[1] in (H, W) and v.shape[2].is_Integer
    forms: list[Callable[[Draw, Value], str]] = [of_numbers, of_numbers, of_numbers]
    if rows:
        forms += [of_classes, of_classes]
    d.put(d.rng.choice(forms)(d, v), (), kind="term")


def of_numbers(d: Draw, v: Value) -> str:
    x = v.name
    reduction = d.pick("mean", "sum")
    return str(d.pick(
        f"{x}.square().mean()", f"({x} * {x}.detach().cos()).sum() / {d.pick('h', 'b', d.const(4.0, 8.0))}",
        f"F.mse_loss({x}, {x}.detach().sin())", f"F.mse_loss({x}, torch.zeros_like({x}), reduction={reduction!r})",
        f"F.smooth_l1_loss({x}, {x}.detach() * 0.5 + 0.2, beta={d.const(0.5, 1.0)})", f"torch.logsumexp({x}.flatten(), 0)",
        f"F.huber_loss({x}, {x}.detach() + 0.3, delta={d.const(0.2, 1.0)}, reduction={reduction!r})",
        f"{x}.sin().sum()", f"{x}.mean()", f"F.l1_loss({x}, {x}.detach() + 0.5, reduction={reduction!r})",
        f"F.binary_cross_entropy_with_logits({x}, ({x}.detach() > 0.1).to({x}.dtype))", f"{x}.pow(2).sum().sqrt()",
        f"F.mse_loss({x}, {x}.detach().cos(), reduction='none').mean()", f"({x}.tanh() + 1).log().mean()",
        f"F.kl_div(F.log_softmax({x}, -1), ({x}.detach() * 0.5).softmax(-1), reduction={d.pick('sum', 'batchmean', 'mean')!r})",
        f"{x}.square().sum() / {x}.numel()", f"{x}.square().sum(-1).mean(0).sum()", f"torch.linalg.vector_norm({x} + 1)",
        f"{x}.var()", f"F.soft_margin_loss({x}, {x}.detach().sign())", f"{x}.abs().max() + {x}.mean()",
    ))  # fmt: skip


def of_classes(d: Draw, v: Value) -> str:
    labels, keep = ("ids", "keep") if v.shape[1] == H else ("jds", "stay")
    weight = d.parameter(CLASSES, int(v.shape[2]))
    logits = f"F.linear({v.name}, {weight})"
    ignore = d.pick(
        "", "", ", ignore_index=0", ", ignore_index=1", ", ignore_index=-1", ", ignore_index=-100"
    )
    more = d.pick(
        "",
        "",
        "",
        f", label_smoothing={d.const(0.1, 0.2)}",
        ", weight=torch.linspace(0.5, 1.5, 5).to(torch.float64)",
    )
    reduction = d.pick("", "", ", reduction='sum'")
    some = d.pick(
        labels,
        labels,
        f"torch.where({keep}, {labels}, -100)",
        f"{labels}.masked_fill(~{keep}, -100)",
    )
    if some != labels:
        ignore = d.pick("", ", ignore_index=-100")
    kind = d.pick("flat", "flat", "dim", "nll", "shifted", "none", "gather")
    if kind == "dim":
        return f"F.cross_entropy({logits}.mT, {some}{ignore}{more}{reduction})"
    if kind == "nll":
        return f"F.nll_loss(F.log_softmax({logits}, -1).flatten(0, 1), {some}.flatten(){ignore}{reduction})"
    if kind == "shifted":
        return f"F.cross_entropy({logits}[:, :-1].flatten(0, 1), {some}[:, 1:].flatten(){ignore}{more}{reduction})"
    if kind == "none":
        each = f"F.cross_entropy({logits}.flatten(0, 1), {some}.flatten(), reduction='none'{ignore}{more})"
        return d.pick(f"{each}.mean()", f"({each} * {keep}.flatten()).sum() / ({keep}.sum() + 1)")
    if kind == "gather":
        return f"-F.log_softmax({logits}, -1).gather(-1, {labels}[..., None]).mean()"
    return f"F.cross_entropy({logits}.reshape(-1, {CLASSES}), {some}.reshape(-1){ignore}{more}{reduction})"
