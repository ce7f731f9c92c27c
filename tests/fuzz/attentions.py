"""Attention, fused or spelled out, with operands in many orders of strides and masks of all kinds."""

# ruff: noqa: E501 - a line of source a template

from __future__ import annotations

from typing import Any

from tests.fuzz.draw import B, Draw, H, Skip, Value, W, template

HEADS, HEAD = 2, 2


def heads(d: Draw, v: Value, count: int = HEADS) -> str:
    """Returns a value as `[b, heads, n, HEAD]`, in some order of strides."""
    n, c = v.shape[1:]
    w = d.parameter(count * HEAD, int(c))
    projected = f"F.linear({v.name}, {w})"
    return d.pick(
        f"{projected}.view(b, {n}, {count}, {HEAD}).transpose(1, 2)",
        f"{projected}.view(b, {n}, {count}, {HEAD}).permute(0, 2, 1, 3).contiguous()",
        f"{projected}.view(b, {n}, {HEAD}, {count}).permute(0, 3, 1, 2)",
        f"({w} @ {v.name}.mT).view(b, {count}, {HEAD}, {n}).mT",
        f"{projected}.unflatten(-1, ({count}, {HEAD})).movedim(2, 1)",
        f"F.linear({v.name}, torch.cat([{w}, {w}.sin()]))[..., ::2].reshape(b, {n}, {count}, {HEAD}).transpose(1, 2)",
        f"F.linear({v.name}, torch.cat([{w}, {w}.cos()]))[..., :{count * HEAD}].view(b, {n}, {count}, {HEAD}).transpose(1, 2)",
        f"{projected}.view(b, {n}, {count}, {HEAD}).transpose(1, 2).repeat_interleave(2, -1)[..., ::2]",
        f"({projected}.mean(1, keepdim=True) + {projected} * 0.5).view(b, {n}, {count}, {HEAD}).transpose(1, 2)",
        f"torch.stack([{projected}, {projected}.sin(), {projected}.cos()], -1).unbind(-1)[{d.pick(0, 1, 2)}].view(b, {n}, {count}, {HEAD}).transpose(1, 2)",
    )  # fmt: skip


def mask(d: Draw, n: Any, m: Any) -> tuple[str, bool]:
    """Returns a mask of `[n, m]` or broadcast, and whether it is truths (seen) or numbers."""
    q, k = f"torch.arange({n})[:, None]", f"torch.arange({m})"
    dtype = d.dtype("int64", "int32", "float64", "float32", "uint8", "int16", "bfloat16")
    c = d.const(1, 2, 3)
    fill = d.pick("float('-inf')", "-1e9", "torch.finfo(torch.float64).min", "-1e30")
    position = d.pick(
        f"{q} >= {k}", f"{k} <= {q} + {c}", f"({q} - {k}).abs() <= {c}", f"({k} <= {q}) & ({k} > {q} - {c})",
        f"{q} // {c} == {k} // {c}", f"torch.arange({n}, dtype={dtype})[:, None] >= torch.arange({m}, dtype={dtype})",
        f"{q} < {d.number()} + {k}", f"({k} < {c}) | ({q} >= {k})", f"~({q} < {k})", f"({q} >= {k}) | ({k} % {c} == 0)",
        f"torch.ones({n}, {m}, dtype=torch.bool).tril({d.pick(0, 1, 2)})", f"torch.ones({n}, {m}).tril() > 0",
        f"torch.ones({n}, {m}).triu(1) == 0", f"{q} * {n} >= {k} * {m}", f"({q} - {k}) % {c} == 0",
        f"({q} + 1) / {n} >= {k} / {m}", f"torch.ones({n}, {m}, dtype=torch.int64).tril().bool()",
        f"torch.arange({m}).flip(0) >= {k} - {q}", f"({q} >= {k}).to({dtype}) == 1",
    )  # fmt: skip
    kind = d.pick(
        "position", "position", "number", "keep", "both", "bias", "segment", "triu", "zeros"
    )
    keep, ids = ("keep", "ids") if m == H else ("stay", "jds")
    if kind in ("keep", "both", "segment") and m not in (H, W):
        kind = "position"
    if kind == "keep":
        return d.pick(
            f"{keep}[:, None, None]", f"({ids} != {d.pick(0, 1)})[:, None, None, :]"
        ), True
    if kind == "both":
        return f"({position}) & {keep}[:, None, None]", True
    if kind == "segment" and n == m:
        return f"(({ids}[:, :, None] == {ids}[:, None]) & ({q} >= {k}))[:, None]", True
    if kind == "number":
        return (
            f"torch.zeros({n}, {m}, dtype=torch.float64).masked_fill(~({position}), {fill})",
            False,
        )
    if kind == "triu":
        return f"torch.full(({n}, {m}), {fill}, dtype=torch.float64).triu({d.pick(1, 2)})", False
    if kind == "zeros":
        return f"torch.where({position}, 0.0, {fill}).to(torch.float64)", False
    if kind == "bias":
        return (
            f"({k} - {q}) * torch.tensor([0.5, {d.const(0.25, 0.125)}]).view(2, 1, 1).to(torch.float64)",
            False,
        )
    return position, True


def operands(d: Draw) -> tuple[Value, Value]:
    def rows(v: Value) -> bool:
        return v.kind == "float" and v.ndim == 3 and v.shape[0] == B and v.shape[2].is_Integer

    v = d.among(rows)
    u = v if d.flag(0.6) else d.among(rows)
    if v.shape[1].is_Integer or u.shape[1].is_Integer:
        raise Skip
    return v, u


@template(3)
def fused(d: Draw, _: Value) -> None:
    v, u = operands(d)
    n, m = v.shape[1], u.shape[1]
    groups = d.flag(0.2)
    q = heads(d, v)
    k, w = heads(d, u, 1 if groups else HEADS), heads(d, u, 1 if groups else HEADS)
    extra = []
    if d.flag(0.25):
        extra.append("is_causal=True")
    elif d.flag(0.75):
        extra.append(f"attn_mask={mask(d, n, m)[0]}")
    if d.flag(0.4):
        extra.append(f"scale={d.pick(d.const(0.5, 1.0), d.number(), '-0.5')}")
    if groups:
        extra.append("enable_gqa=True")
    made = d.put(
        f"F.scaled_dot_product_attention({', '.join([q, k, w, *extra])})", (B, HEADS, n, HEAD)
    )
    back = d.pick("{0}.transpose(1, 2).reshape(b, {n}, -1)", "{0}.transpose(1, 2).flatten(2)")
    d.put(back.format(made.name, n=n), (B, n, HEADS * HEAD))


@template(3)
def spelled(d: Draw, _: Value) -> None:
    v, u = operands(d)
    n, m = v.shape[1], u.shape[1]
    q, k, w = heads(d, v), heads(d, u), heads(d, u)
    scores = d.fresh()
    scale = d.pick(
        f" * {d.const(0.5, 1.0)}",
        f" / math.sqrt({HEAD})",
        "",
        f" / {d.const(2.0, 1.5)}",
        " * -0.5",
        f" * ({d.number()})",
    )
    product = d.pick(f"({q}) @ ({k}).mT", f"torch.matmul({q}, ({k}).transpose(-1, -2))",
                     f"torch.einsum('bhid,bhjd->bhij', {q}, {k})")  # fmt: skip
    lines = [f"{scores} = {product}{scale}"]
    if d.flag(0.8):
        seen, truth = mask(d, n, m)
        fill = d.pick("float('-inf')", "-1e9", "torch.finfo(torch.float64).min")
        lines.append(
            d.pick(f"{scores} = {scores}.masked_fill(~({seen}), {fill})",
                   f"{scores} = torch.where({seen}, {scores}, {fill})") if truth
            else f"{scores} = {scores} + {seen}"
        )  # fmt: skip
    out = d.fresh()
    weights = d.pick(
        f"{scores}.softmax(-1)", f"F.softmax({scores}, dim=-1)", f"torch.softmax({scores}, 3)"
    )
    lines.append(f"{out} = ({weights} @ ({w})).transpose(1, 2).flatten(2)")
    d.put(lines, (B, n, HEADS * HEAD), out=out)


@template(1)
def shared(d: Draw, _: Value) -> None:
    """Several samples of each sample, which share a mask or a bias that learns."""
    v, u = operands(d)
    n, m = v.shape[1], u.shape[1]
    times = d.pick(2, 3)
    names = [d.fresh() for _ in range(3)]
    lines = []
    for name, x in zip(names, (v, u, u), strict=True):
        lines.append(f"{name} = {heads(d, x)}")
        each = ", ".join([name, f"{name} * 0.5", f"{name} - 0.1"][:times])
        lines.append(f"{name} = torch.stack([{each}], 1)")
    given = d.fresh()
    learns = f"({heads(d, v)} @ ({heads(d, u)}).mT)"
    source = (
        learns if d.flag() else f"torch.broadcast_to({mask(d, n, m)[0]}, (b, {HEADS}, {n}, {m}))"
    )
    lines.append(f"{given} = {source}")
    repeated = d.pick("{0}.repeat_interleave({1}, 0)", "{0}[:, None].expand(-1, {1}, -1, -1, -1).flatten(0, 1)",
                      "{0}[:, None].expand(-1, {1}, -1, -1, -1).reshape(b * {1}, 2, {2}, {3})")  # fmt: skip
    q, k, w = names
    out = d.fresh()
    if d.flag():
        lines.append(
            f"{out} = F.scaled_dot_product_attention({q}, {k}, {w}, attn_mask={given}[:, None])"
        )
    else:
        joined = ", ".join(f"{x}.flatten(0, 1)" for x in names)
        lines.append(f"{given} = {repeated.format(given, times, n, m)}")
        lines.append(
            f"{out} = F.scaled_dot_product_attention({joined}, attn_mask={given}).unflatten(0, (b, {times}))"
        )
    lines.append(f"{out} = {out}.sum(1).transpose(1, 2).flatten(2)")
    d.put(lines, (B, n, HEADS * HEAD), out=out)
