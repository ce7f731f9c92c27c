"""What a step may be: one function a family of ops, over the whole table of sharding rules."""

# ruff: noqa: E501 - a line of source a template

from __future__ import annotations

import sympy

from tests.fuzz.draw import WIDTH, B, Draw, H, Skip, Value, W, template

UNARY = (
    "torch.tanh({0})", "{0}.sigmoid()", "F.gelu({0})", "F.silu({0})", "F.softplus({0})",
    "torch.exp({0}.tanh())", "torch.log1p({0}.abs())", "torch.sqrt({0}.square() + 1)",
    "torch.rsqrt({0} ** 2 + `1.0`)", "torch.erf({0})", "torch.atan({0})", "{0}.abs()", "F.relu({0})",
    "F.relu6({0})", "F.elu({0})", "F.hardtanh({0})", "F.hardswish({0})", "F.mish({0})",
    "F.logsigmoid({0})", "F.softsign({0})", "F.tanhshrink({0})", "F.selu({0})", "torch.sin({0})",
    "torch.cos({0})", "torch.asinh({0})", "torch.reciprocal({0}.square() + 1)", "torch.sinc({0})",
    "torch.expm1({0}.tanh())", "torch.frac({0})", "torch.round({0}) + {0}", "torch.sign({0}) * {0}",
    "-{0}", "{0}.detach() * {0}", "torch.lgamma({0}.abs() + 1)", "torch.logit({0}.sigmoid() * 0.9)",
    "torch.clone({0})", "{0}.contiguous()", "F.hardsigmoid({0})", "torch.erfc({0})",
    "torch.special.i0(torch.tanh({0}))", "torch.square({0})", "torch.log2({0}.abs() + 1)",
    "F.gelu({0}, approximate='tanh')", "torch.floor({0}) + {0}", "torch.nan_to_num({0})",
    "torch.deg2rad({0})", "torch.where({0} > 0, {0}, {0} * 0.1)", "F.hardshrink({0})",
)  # fmt: skip
SCALED = (
    "{0} * ({n})", "{0} + ({n})", "({n}) - {0}", "{0} / ({n} + 1)", "{0}.clamp(max={n})",
    "{0}.clamp(-({n}), {m})", "{0}.clamp_min(-({n}))", "F.leaky_relu({0}, {n})", "F.elu({0}, {n})",
    "torch.lerp({0}, {0}.tanh(), {n})", "{0}.masked_fill({0} > {n}, {m})", "torch.fmod({0}, {n})",
    "torch.remainder({0}, {n})", "torch.where({0} < {n}, {0}, {m} * {0})", "F.threshold({0}, {n}, {m})",
    "torch.full_like({0}, {n}) * {0}", "F.softplus({0}, beta={n})", "torch.add({0}, {0}.sin(), alpha={n})",
    "torch.addcmul({0}, {0}, {0}.cos(), value={n})", "torch.rsub({0}, {n})", "torch.pow({0}.abs() + 1, {n})",
    "torch.addcdiv({0}, {0}, {0}.square() + 1, value={n})", "torch.sub({0}, {0}.cos(), alpha={n})",
    "{0} * torch.tensor({c})", "torch.where({0} > {n}, {0}, {m})", "{0} * ({n} + {m})",
    "torch.clamp({0}, min={n} - 1)", "F.hardtanh({0}, -({n}), {m})", "F.celu({0}, {c})",
    "{0} * min({n}, {m})" , "{0}.mul({n}).add({m})", "torch.true_divide({0}, {n} + 1)",
)  # fmt: skip
BINARY = (
    "{0} + {1}", "{0} * {1}", "{0} - {1}", "{0} / ({1}.abs() + 1)", "torch.maximum({0}, {1})",
    "torch.minimum({0}, {1})", "torch.hypot({0} + 2, {1})", "torch.atan2({0}, {1}.abs() + 1)",
    "torch.logaddexp({0}, {1})", "torch.where({0} > {1}, {0}, {1})", "torch.lerp({0}, {1}, {n})",
    "torch.add({0}, {1}, alpha={n})", "torch.addcmul({0}, {1}, {1}, value={n})", "{0} * {1}.sigmoid()",
    "F.gelu({0}) * {1}", "torch.where(({0} > 0) & ({1} < {n}), {0}, {1})", "{0}.sub({1}, alpha={c})",
    "torch.copysign({0}, {1})", "torch.xlogy({0}, {1}.square() + 1)", "{0} * ({1} > 0)",
)  # fmt: skip


@template(3)
def unary(d: Draw, v: Value) -> None:
    d.put(d.pick(*UNARY).format(v.name), v.shape)


@template(4)
def scaled(d: Draw, v: Value) -> None:
    c = d.const(0.5, 1.5, 0.25)
    d.put(d.pick(*SCALED).format(v.name, n=d.number(), m=d.number(), c=c), v.shape)


@template(3)
def binary(d: Draw, v: Value) -> None:
    u = d.like(v)
    d.put(d.pick(*BINARY).format(v.name, u.name, n=d.number(), c=d.const(0.5, 2.0)), v.shape)


@template(2)
def broadcast(d: Draw, v: Value) -> None:
    """Rows against rows: (.., h, c) and (.., w, c) to (.., h, w, c), or by an expanded mean."""
    u = d.among(lambda u: u.kind == "float" and u.ndim == v.ndim and u.shape[-1] == v.shape[-1])
    if v.ndim == 3 and u.shape[0] == v.shape[0] and d.flag(0.4):
        op = d.pick("{0}[:, :, None] * {1}[:, None]", "{0}.unsqueeze(2) - {1}.unsqueeze(1)")
        d.put(op.format(v.name, u.name), (v.shape[0], v.shape[1], *u.shape[1:]))
        return
    dim = d.dim(v)
    how = d.pick("mean", "sum", "amax", "logsumexp")
    at = d.named(v, dim)
    if u.shape[:dim] + u.shape[dim + 1 :] != v.shape[:dim] + v.shape[dim + 1 :]:
        u = v
    text = f"{u.name} - {v.name}.{how}({at}, keepdim=True)"
    if d.flag(0.3):
        text = f"{u.name} + {v.name}.{how}({at}, keepdim=True).expand_as({u.name})"
    d.put(text, u.shape)


@template(4)
def positions(d: Draw, v: Value) -> None:
    """Numbers of positions, in some dtype, computed with scalars, against a value."""
    dim = d.dim(v)
    n = v.shape[dim]
    tail = "".join("[:, None]" if i == 0 else ".unsqueeze(-1)" for i in range(v.ndim - 1 - dim))
    start = d.const(1, 2)
    made = d.pick(
        f"torch.arange({n})", f"torch.arange({n}, dtype=torch.float64)", f"torch.arange(0, {n})",
        f"torch.arange({start}, {n} + {start})", f"torch.linspace(0, 1, {n}, dtype=torch.float64)",
        f"torch.ones({n}, dtype=torch.float64).cumsum(0)", f"torch.arange({n} - 1, -1, -1)",
        f"torch.full(({n},), {d.number()}, dtype=torch.float64)",
        f"torch.arange({n}, dtype={d.dtype('int32', 'float32', 'int16')})",
        f"torch.arange(0, 2 * ({n}), 2)",
    )  # fmt: skip
    if not n.free_symbols:
        made = f"torch.arange({n})"
    some = d.pick(
        "{0} / ({n} + 1)", "{0} * ({n})", "({0} < {k})", "({0} % {c})", "({0} // {c})", "({0} - {n})",
        "({0} == {k})", "({0} != {k})", "({0} >= {n})", "torch.sin({0} * 0.3)", "({0} + 1).to(torch.float64).log()",
        "({0} * {n}).floor()", "torch.where({0} > {k}, 1.0, {n})", "({0} + 0.5).clamp(max={n})",
        "({0} / {n}).long()", "({0} > {n}).to(torch.float64)",
    ).format(made, n=d.number(), k=d.integer(n), c=d.const(2, 3, 4))  # fmt: skip
    op = d.pick("{0} * (({1}){t})", "{0} + ({1}){t}", "{0} * torch.cos(({1}){t} * 1.0)")
    d.put(op.format(v.name, some, t=tail), v.shape)


def reduced(v: Value, dim: int, keep: bool) -> tuple:
    return (*v.shape[:dim], *((1,) if keep else ()), *v.shape[dim + 1 :])


@template(2)
def reduction(d: Draw, v: Value) -> None:
    if v.ndim < 3:
        raise Skip
    dim, keep = d.dim(v), d.flag()
    at = d.named(v, dim)
    how = d.pick(
        "{0}.sum({a}, keepdim={k})", "{0}.mean({a}, keepdim={k})", "{0}.amax({a}, keepdim={k})",
        "torch.amin({0}, {a}, keepdim={k})", "torch.logsumexp({0}, {a}, keepdim={k})",
        "torch.var({0}, {a}, keepdim={k}, correction=0)", "({0} * 0.3 + 1).prod({a}, keepdim={k})",
        "torch.linalg.vector_norm({0} + 3, dim={a}, keepdim={k})", "{0}.max({a}, keepdim={k}).values",
        "{0}.max({a}, keepdim={k})[0]", "torch.std({0} + {0}.sin(), {a}, keepdim={k}, correction=0)",
        "torch.norm({0} + 2, {c}, {a}, {k})", "torch.var_mean({0}, {a}, keepdim={k}, correction=0)[1]",
        "{0}.median({a}, keepdim={k}).values", "{0}.min({a}, keepdim={k}).values",
        "{0}.sum({a}, keepdim={k}) / {n}", "{0}.nansum({a}, keepdim={k})",
    )  # fmt: skip
    text = how.format(v.name, a=at, k=keep, c=d.const(2, 3), n=d.number())
    d.put(text, reduced(v, dim, keep))


@template(1)
def reduction_of_two(d: Draw, v: Value) -> None:
    if v.ndim < 4:
        raise Skip
    how = d.pick("sum", "mean", "amax", "logsumexp")
    d.put(
        f"{v.name}.{how}(({d.pick('1, 2', '-1, 1', '-1, -2')}), keepdim=True) * {v.name}", v.shape
    )


@template(4)
def along(d: Draw, v: Value) -> None:
    dim = d.dim(v)
    n = v.shape[dim]
    how = d.pick(
        "{0}.cumsum({a})", "({0} * 0.2 + 1).cumprod({a})", "torch.cummax({0}, {a}).values",
        "torch.logcumsumexp({0}, {a})", "{0}.flip({a})", "{0}.roll({i}, {a})", "{0}.roll(-({i}), {a})",
        "{0}.sort({a}).values", "torch.sort({0}, {a}, descending=True)[0]", "{0}.softmax({a})",
        "F.log_softmax({0}, {a})", "F.normalize({0} + 2, dim={a})", "F.normalize({0} + 2, {c}, {a})",
        "torch.softmax({0} * {n}, dim={a})", "torch.argsort({0}, {a}).to({0}.dtype) * {0}",
        "F.softmin({0}, {a})", "{0}.roll(({i}, 1), ({a}, 0))", "{0}.flip(({a},)) + {0}",
        "{0} - {0}.cumsum({a}) / ({n} + 1)", "{0}.argmax({a}, keepdim=True) + {0}",
    )  # fmt: skip
    text = how.format(v.name, a=d.named(v, dim), i=d.integer(n), n=d.number(), c=d.const(2, 3))
    d.put(text, v.shape)


@template(2)
def norm(d: Draw, v: Value) -> None:
    c = v.shape[-1]
    if not c.is_Integer or int(c) < 2:
        raise Skip
    weight, bias = d.parameter(int(c)), d.parameter(int(c))
    eps = d.const(1e-3, 0.1)
    how = d.pick(
        f"F.layer_norm({{0}}, ({c},), {weight}, {bias}, {eps})", f"F.rms_norm({{0}}, ({c},), {weight}, {eps})",
        f"F.layer_norm({{0}}, ({c},))", f"{{0}} * torch.rsqrt({{0}}.pow(2).mean(-1, keepdim=True) + {eps}) * {weight}",
        *([f"F.group_norm({{0}}.transpose(1, 2), 2, {weight}, {bias}).transpose(1, 2)"] if v.ndim == 3 and c % 2 == 0 else []),
        *(["F.instance_norm({0}.mT).mT"] if v.ndim == 3 else []),
        *([f"F.batch_norm({{0}}.mT, None, None, {weight}, training=True).mT"] if v.ndim == 3 else []),
    )  # fmt: skip
    d.put(how.format(v.name), v.shape)


@template(3)
def linear(d: Draw, v: Value) -> None:
    c = v.shape[-1]
    if not c.is_Integer:
        raise Skip
    m = d.pick(WIDTH, WIDTH, WIDTH, 3, 6)
    weight = d.parameter(m, int(c))
    how = d.pick(
        f"F.linear({v.name}, {weight}, {d.parameter(m)})", f"F.linear({v.name}, {weight})",
        f"{v.name} @ {weight}.mT", f"torch.einsum('...i,oi->...o', {v.name}, {weight})",
        f"torch.matmul({v.name}, {weight}.T)", f"torch.tensordot({v.name}, {weight}, dims=([-1], [1]))",
        f"{d.module(f'nn.Linear({c}, {m})')}({v.name})",
    )  # fmt: skip
    d.put(how, (*v.shape[:-1], m))


@template(2)
def sliced_linear(d: Draw, v: Value) -> None:
    c = v.shape[-1]
    if not c.is_Integer:
        raise Skip
    m = d.pick(6, 8)
    start, stop = d.pick((-4, -1), (0, 4), (2, None), (-4, None), (None, -2), (1, -1))
    here = f"{'' if start is None else start}:{'' if stop is None else stop}"
    text = f"F.linear({v.name}, {d.parameter(m, int(c))}, {d.parameter(m)})[..., {here}]"
    d.put(text, (*v.shape[:-1], len(range(m)[slice(start, stop)])))


@template(3)
def product(d: Draw, v: Value) -> None:
    u = d.among(lambda u: u.kind == "float" and u.ndim == v.ndim and u.ndim == 3)
    if u.shape[0] != v.shape[0]:
        raise Skip
    b = v.shape[0]
    if u.shape[2] == v.shape[2]:
        how = d.pick(
            "{0} @ {1}.mT", "torch.bmm({0}, {1}.transpose(1, 2))", "torch.einsum('bic,bjc->bij', {0}, {1})",
            "torch.matmul({0}, {1}.mT) * {n}", "-torch.cdist({0}, {1} + 3)",
            "torch.baddbmm({0} @ {1}.mT, {0}, {1}.mT, beta={n}, alpha={m})",
            "F.cosine_similarity({0}[:, :, None] + 2, {1}[:, None] + 2, dim=-1)",
        )  # fmt: skip
        text = how.format(v.name, u.name, n=d.number(), m=d.number())
        d.put(f"({text}) * 0.3", (b, v.shape[1], u.shape[1]))
    elif v.shape[2] == u.shape[1]:
        d.put(f"{v.name} @ {u.name} * 0.3", (b, v.shape[1], u.shape[2]))
    elif v.shape[1] == u.shape[1]:
        d.put(f"{v.name}.mT @ {u.name} * 0.3", (b, v.shape[2], u.shape[2]))
    else:
        raise Skip


@template(4)
def sliced(d: Draw, v: Value) -> None:
    """A part of a dim: by constants, by sizes, from the end, in steps."""
    dim = d.dim(v, least=3)
    n = v.shape[dim]
    before = ":, " * dim
    k = d.pick(1, 1, 2)
    half = sympy.Symbol(f"(({n}) // 2)", integer=True, positive=True)
    rest = sympy.Symbol(f"(({n}) - ({n}) // 2)", integer=True, positive=True)
    ceil = sympy.Symbol(f"((({n}) + 1) // 2)", integer=True, positive=True)
    if not n.free_symbols:
        half, rest, ceil = n // 2, n - n // 2, (n + 1) // 2
    there, size = d.pick(
        (f"{k}:", n - k), (f":-{k}", n - k), (f":{n} - {k}", n - k), (f":({n}) // 2", half),
        (f"({n}) // 2:", rest), ("::2", ceil), (f"-{k}:", k), (f":{k}", k), ("1::2", half),
        (f"1:{n}", n - 1),
    )  # fmt: skip
    if d.flag(0.25):
        start = d.pick(0, 1)
        d.put(f"{v.name}.narrow({d.named(v, dim)}, {start}, {n} - 1)", _with(v, dim, n - 1))
        return
    d.put(f"{v.name}[{before}{there}]", _with(v, dim, size))


def _with(v: Value, dim: int, size: object) -> tuple:
    return (*v.shape[:dim], size, *v.shape[dim + 1 :])


@template(1.5)
def selected(d: Draw, v: Value) -> None:
    if v.ndim < 3:
        raise Skip
    dim = d.dim(v)
    n = v.shape[dim]
    at = d.pick("0", "-1", f"({n}) // 2", f"{n} - 1", "1", "-2")
    text = d.pick(f"{v.name}[{':, ' * dim}{at}]", f"{v.name}.select({d.named(v, dim)}, {at})")
    d.put(text, reduced(v, dim, False))


@template(3)
def moved(d: Draw, v: Value) -> None:
    """Dims in another order."""
    i, j = d.rng.sample(range(v.ndim), 2)
    order = list(range(v.ndim))
    order[i], order[j] = order[j], order[i]
    shape = [v.shape[k] for k in order]
    text = d.pick(
        f"{v.name}.transpose({i}, {j - v.ndim})", f"{v.name}.permute({', '.join(map(str, order))})",
        f"torch.swapaxes({v.name}, {i}, {j})", f"{v.name}.transpose({j}, {i}).contiguous()",
    )  # fmt: skip
    d.put(text, shape)


@template(2)
def folded(d: Draw, v: Value) -> None:
    """Dims merged, or one cut in two, and what is computed of that."""
    if d.flag() and v.ndim > 2:
        i = d.rng.randrange(v.ndim - 1)
        shape = (*v.shape[:i], v.shape[i] * v.shape[i + 1], *v.shape[i + 2 :])
        sizes = ", ".join("-1" if k == i else str(n) for k, n in enumerate(shape))
        text = d.pick(f"{v.name}.flatten({i}, {i + 1})", f"{v.name}.reshape({sizes})")
        d.put(text, shape)
        return
    c = v.shape[-1]
    if not c.is_Integer or int(c) % 2 or int(c) < 4 or v.ndim > 3:
        raise Skip
    shape = (*v.shape[:-1], 2, c // 2)
    rows = ", ".join(map(str, v.shape[:-1]))
    text = d.pick(f"{v.name}.unflatten(-1, (2, {c // 2}))", f"{v.name}.reshape({rows}, 2, -1)")
    made = d.put(text, shape)
    if v.ndim == 3 and d.flag(0.7):
        d.put(f"{made.name}.transpose(1, 2)", (shape[0], 2, shape[1], c // 2))


@template(3)
def joined(d: Draw, v: Value) -> None:
    dim = d.dim(v)
    others = [
        u
        for u in d.values
        if u.kind == "float" and u.ndim == v.ndim
        and u.shape[:dim] + u.shape[dim + 1 :] == v.shape[:dim] + v.shape[dim + 1 :]
    ]  # fmt: skip
    u = d.rng.choice(others)
    at = d.named(v, dim)
    kind = d.pick("cat", "cat", "stack", "repeat", "interleave", "pad", "same")
    if kind == "cat":
        d.put(f"torch.cat([{v.name}, {u.name}], {at})", _with(v, dim, v.shape[dim] + u.shape[dim]))
    elif kind == "stack" and v.ndim < 4:
        d.put(
            f"torch.stack([{v.name}, {v.name}.sin()], {dim})", (*v.shape[:dim], 2, *v.shape[dim:])
        )
    elif kind == "repeat":
        times = ", ".join("2" if i == dim else "1" for i in range(v.ndim))
        op = d.pick(f"{v.name}.repeat({times})", f"torch.tile({v.name}, ({times}))")
        d.put(op, _with(v, dim, 2 * v.shape[dim]))
    elif kind == "interleave":
        d.put(f"{v.name}.repeat_interleave(2, {at})", _with(v, dim, 2 * v.shape[dim]))
    elif kind == "pad":
        d.put(
            f"torch.cat([{v.name}, {v.name}.narrow({at}, 0, 1)], {at})",
            _with(v, dim, v.shape[dim] + 1),
        )
    else:
        d.put(
            f"torch.cat([{u.name}, {v.name} * {d.number()}], {at}).narrow({at}, 1, {v.shape[dim]})",
            v.shape,
        )


@template(2)
def padded(d: Draw, v: Value) -> None:
    if v.ndim != 3:
        raise Skip
    n = v.shape[1]
    left, right = d.rng.choice([(1, 0), (0, 1), (1, 1), (2, 1), (0, 2)])
    mode = d.pick("constant", "constant", "replicate", "reflect", "circular")
    if mode == "constant":
        value = d.number()
        text = d.pick(
            f"F.pad({v.name}, (0, 0, {left}, {right}))", f"F.pad({v.name}, (0, 0, {left}, {right}), value={value})",
            f"F.pad({v.name}, (0, 0, {left}, {right}))",
        )  # fmt: skip
        d.put(text, (v.shape[0], n + left + right, v.shape[2]))
        return
    left, right = min(left, 1), min(right, 1)
    text = f"F.pad({v.name}.mT, ({left}, {right}), mode={mode!r}).mT"
    d.put(text, (v.shape[0], n + left + right, v.shape[2]))


@template(3)
def split(d: Draw, v: Value) -> None:
    dim = d.dim(v, least=2)
    n, at = v.shape[dim], d.named(v, dim)
    text, size = d.pick(
        (f"{v.name}.split([1, {n} - 1], {at})[1]", n - 1), (f"{v.name}.split([{n} - 1, 1], {at})[0]", n - 1),
        (f"{v.name}.unfold({at}, 2, 1).mean(-1)", n - 1), (f"{v.name}.diff(dim={at})", n - 1),
        (f"torch.cat({v.name}.chunk(2, {at})[::-1], {at})", n), (f"torch.cat({v.name}.tensor_split(2, {at})[::-1], {at})", n),
        (f"{v.name}.topk(2, {at}).values", 2), (f"torch.cat({v.name}.split(2, {at})[:1], {at})", 2),
        (f"{v.name}.tril({d.pick(0, 1, -1)})", n), (f"{v.name}.triu({d.pick(0, 1, -1)})", n),
    )  # fmt: skip
    d.put(text, _with(v, dim, size))


@template(2)
def triangle(d: Draw, v: Value) -> None:
    n, m = v.shape[-2:]
    if not n.free_symbols:
        raise Skip
    made = d.pick(
        "torch.ones({n}, {m}).tril()", "torch.ones({n}, {m}, dtype=torch.bool).triu({k})", "torch.eye({n}, {m})",
        "torch.ones({n}, {m}).tril({i})", "(torch.arange({n})[:, None] >= torch.arange({m}))",
        "(torch.arange({n})[:, None] - torch.arange({m})).abs()", "torch.arange({n}).outer(torch.arange({m}) + 1)",
        "torch.full(({n}, {m}), {s}).triu(1)", "(torch.arange({n}).unsqueeze(1) != torch.arange({m}))",
    ).format(n=n, m=m, k=d.pick(0, 1), i=d.integer(n), s=d.number())  # fmt: skip
    text = d.pick(f"{v.name} * {made}", f"{v.name}.masked_fill({made} > 0, {d.number()})")
    d.put(text, v.shape)


@template(2.5)
def indexed(d: Draw, v: Value) -> None:  # noqa: C901 - a list of forms
    """Rows at positions: constant ones, computed ones, those of an input."""
    if v.ndim != 3:
        raise Skip
    n = v.shape[1]
    k = d.const(1, 2, 3)
    ids = "ids" if not d.both or d.flag() else "jds"
    m = H if ids == "ids" else W
    index = d.pick(
        f"torch.arange({n}).flip(0)", f"(torch.arange({n}) + {k}) % ({n})", f"torch.arange({n} - 1, -1, -1)",
        f"(torch.arange({n}) - {k}).clamp(min=0)", f"(torch.arange({n}) * {k}).clamp(max={n} - 1)",
        f"torch.arange({n}) // {k}", f"torch.arange({n}).roll({k})",
    )  # fmt: skip
    kind = d.pick("index", "select", "gather", "rows", "scatter", "add", "take", "fill", "copy")
    if kind == "index":
        d.put(f"{v.name}[:, {index}]", v.shape)
    elif kind == "select":
        d.put(f"{v.name}.index_select(1, {index})", v.shape)
    elif kind == "gather":
        at = f"(({ids}) % ({n}))[:, :, None].expand(-1, -1, {v.shape[2]})"
        d.put(f"{v.name}.gather(1, {at})", (v.shape[0], m, v.shape[2]))
    elif kind == "take":
        at = f"({ids} % ({n}))[:, :, None]"
        d.put(f"torch.take_along_dim({v.name}, {at}, 1)", (v.shape[0], m, v.shape[2]))
    elif kind == "rows":
        d.put(
            f"{v.name}[torch.arange({v.shape[0]})[:, None], {ids} % ({n})]",
            (v.shape[0], m, v.shape[2]),
        )
    elif kind == "scatter":
        if m != n:
            raise Skip
        at = f"(({ids}) % ({n}))[:, :, None].expand_as({v.name})"
        d.put(f"torch.zeros_like({v.name}).scatter_add(1, {at}, {v.name})", v.shape)
    elif kind == "add":
        d.put(f"{v.name}.index_add(1, {index}, {v.name}.sin(), alpha={d.const(0.5, 2.0)})", v.shape)
    elif kind == "fill":
        d.put(f"{v.name}.index_fill(1, torch.tensor([0, 1]), {d.const(0.5, 1.5)})", v.shape)
    else:
        d.put(f"{v.name}.index_copy(1, torch.arange({n}).flip(0), {v.name}.cos())", v.shape)


@template(1.5)
def looked_up(d: Draw, v: Value) -> None:
    """Integers of the inputs: an embedding, one-hot rows, a mask."""
    ids, n = ("ids", H) if not d.both or d.flag() else ("jds", W)
    table = d.parameter(9, WIDTH)
    k = d.const(1, 2, 3)
    text = d.pick(
        f"F.embedding({ids}, {table})", f"F.embedding({ids} + {k}, {table}, padding_idx={d.pick(0, 1)})", f"{table}[{ids} * 2]",
        f"F.one_hot({ids}, 9).to(torch.float64) @ {table}", f"{table}[torch.arange({n}) % {k}] * ({ids} > {k})[..., None]",
        f"F.embedding({ids}, {table}) * ({ids} != {d.pick(0, 1)})[..., None]",
        f"{table}[torch.bucketize({ids} * 1.0, torch.tensor([0.5, 1.5, 2.5]))]",
        f"{table}.index_select(0, {ids}.flatten()).view(*{ids}.shape, {WIDTH})",
    )  # fmt: skip
    d.put(text, (B, n, WIDTH))


@template(2)
def masked(d: Draw, v: Value) -> None:
    keep, ids, n = ("keep", "ids", H) if not d.both or d.flag() else ("stay", "jds", W)
    if v.ndim != 3 or v.shape[:2] != (B, n):
        raise Skip
    k = d.const(1, 2, 3)
    m = d.pick(keep, f"({ids} > {k})", f"({ids} != {d.pick(0, 1)})", f"~{keep}", f"({keep} & ({ids} < {k}))",
               f"({ids} == {k})")  # fmt: skip
    text = d.pick(
        "{0} * {m}[..., None]", "{0}.masked_fill({m}[:, :, None], {n})", "torch.where({m}[..., None], {0}, {n})",
        "({0} * {m}.unsqueeze(-1)).sum(1, keepdim=True) / ({m}.sum(1)[:, None, None] + 1) + {0}",
        "torch.where({m}.unsqueeze(2), {0}, {0}.sin())", "{0} * {m}.to(torch.float64)[..., None].cumsum(1)",
        "{0} + ({m}.cumsum(1) - 1).clamp(min=0)[..., None] * {n}",
    ).format(v.name, m=m, n=d.number())  # fmt: skip
    d.put(text, v.shape)


@template(3)
def convolved(d: Draw, v: Value) -> None:
    if v.ndim != 3 or not v.shape[2].is_Integer:
        raise Skip
    c, n = int(v.shape[2]), v.shape[1]
    k = d.pick(1, 2, 3)
    weight = d.parameter(WIDTH, c, k)
    half = sympy.Symbol(f"(({n}) // 2)", integer=True, positive=True)
    text, size, width = d.pick(
        (f"F.conv1d({{0}}.mT, {weight}).mT", n - k + 1, WIDTH),
        (f"F.conv1d({{0}}.mT, {weight}, padding={k - 1}).mT[:, :{n}]", n, WIDTH),
        (f"F.conv1d(F.pad({{0}}.mT, ({k - 1}, 0)), {weight}).mT", n, WIDTH),
        (f"F.conv1d({{0}}.mT, {weight}, padding='same').mT", n, WIDTH),
        (f"F.conv1d({{0}}.mT, {d.parameter(c, 1, k)}, groups={c}, padding={k - 1}).mT[:, :{n}]", n, c),
        ("F.avg_pool1d({0}.mT, 2).mT", half, c), ("F.max_pool1d({0}.mT, 2).mT", half, c),
        ("F.avg_pool1d({0}.mT, 3, 1, 1).mT", n, c), ("F.max_pool1d({0}.mT, 3, 1, 1).mT", n, c),
        ("F.interpolate({0}.mT, scale_factor=2.0).mT", 2 * n, c),
        (f"F.interpolate({{0}}.mT, size={n} + 1, mode='linear').mT", n + 1, c),
        (f"F.conv_transpose1d({{0}}.mT, {d.parameter(c, WIDTH, 2)}, stride=2).mT", 2 * n, WIDTH),
        ("F.adaptive_avg_pool1d({0}.mT, 2).mT", 2, c),
    )  # fmt: skip
    d.put(text.format(v.name), (v.shape[0], size, width))


@template(3)
def written(d: Draw, v: Value) -> None:
    """Writes in place, through views."""
    out = d.fresh()
    dim = d.dim(v, least=2)
    at = ":, " * dim
    n = v.shape[dim]
    lines = d.pick(
        ["{o}[{at}1:] += {v}[{at}:-1]"], ["{o}[{at}0] = {n}"], ["{o}.mul_({n})"], ["{o}.narrow({dim}, 0, 1).zero_()"],
        ["{o}[{at}-1:] = {v}[{at}:1]"], ["{o}.masked_fill_({v} > {n}, {n})"], ["{o}.transpose(0, 1)[0] += 1.0"],
        ["{o}.add_({v}.cos(), alpha={n})"], ["{o}[{at}::2] *= {n}"], ["{o}[{at}:({s}) // 2].neg_()"],
        ["{o} += {v}.mean({dim}, keepdim=True)"], ["{o}[{at}1:].copy_({v}[{at}:-1])"],
        ["{o}.clamp_(max={n})", "{o}.sub_({n})"], ["{o}[{v} < 0] = 0.5"],
        ["{o}.select({dim}, -1).fill_({n})", "{o}.sin_()"], ["{o}[{at}:1] = {o}[{at}-1:] * 2.0"],
    )  # fmt: skip
    n_text = d.number()
    start = d.pick(
        f"{out} = {v.name}.clone()",
        f"{out} = {v.name} * 1.0",
        f"{out} = torch.zeros_like({v.name}) + {v.name}",
    )
    made = [x.format(o=out, v=v.name, at=at, n=n_text, dim=dim, s=n) for x in lines]
    d.put([start, *made], v.shape, out=out)


@template(1)
def meshed(d: Draw, v: Value) -> None:
    if not d.both or v.ndim != 3 or v.shape[1] not in (H, W):
        raise Skip
    n, m = v.shape[1], W if v.shape[1] == H else H
    text = d.pick(
        f"{v.name}[:, :, None] * (torch.arange({n})[:, None] / {m} + torch.arange({m}) / {n})[..., None]",
        f"{v.name}[:, :, None] + torch.meshgrid(torch.arange({n}) / {d.number()}, torch.arange({m}) / {d.number()}, indexing='ij')[{d.pick(0, 1)}][..., None]",
        f"{v.name}.unsqueeze(2).expand(-1, -1, {m}, -1) * {d.number()}",
        f"{v.name}[:, :, None].repeat(1, 1, {m}, 1)",
    )  # fmt: skip
    d.put(text, (v.shape[0], n, m, v.shape[2]))


@template(0.1)  # torch captures them for one length alone
def recurrent(d: Draw, v: Value) -> None:
    if v.ndim != 3 or not v.shape[2].is_Integer:
        raise Skip
    c = v.shape[2]
    how = d.pick("GRU", "LSTM", "RNN")
    d.put(f"{d.module(f'nn.{how}({c}, 3, batch_first=True)')}({v.name})[0]", (*v.shape[:2], 3))


@template(0.7)
def low(d: Draw, v: Value) -> None:
    """Parity of sizes in arithmetic, and numbers that only some sizes have."""
    n = d.size()
    c = d.const(2, 3, 4, 5)
    text = d.pick(
        f"{v.name} * ({n} % {c})", f"{v.name} * ({n} // {c})", f"{v.name} * (({n} + {c} - 1) // {c})",
        f"{v.name} + max({n}, {c})", f"{v.name} * min({n}, {c})", f"{v.name} / ({n} * {n})", f"{v.name} * math.ceil({n} / 2)",
        f"{v.name} * int({n} / {c})", f"{v.name} * float({n})", f"{v.name} * ({n} - {c})", f"{v.name} * ({n} > {c})",
    )  # fmt: skip
    d.put(text, v.shape)
