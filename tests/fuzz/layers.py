"""Steps of several lines: norms of pixels, cells, blocks applied again, groups, fills of sizes."""

# ruff: noqa: E501 - a line of source a template

from __future__ import annotations

from tests.fuzz.draw import WIDTH, B, Draw, H, Skip, Value, template


def rows(v: Value) -> tuple[object, int]:
    """Returns length and width of `[b, n, c]` floats whose width is even and whose length is named."""
    if v.ndim != 3 or v.shape[0] != B or not v.shape[2].is_Integer or int(v.shape[2]) % 2:
        raise Skip
    if v.shape[1].is_Integer:
        raise Skip
    return v.shape[1], int(v.shape[2])


def channel_norm(d: Draw, c: int, x: str, dims: int = 2) -> str:
    """Returns a norm of `[b, c, ...]`, whose kernel may look at strides."""
    weight, bias = d.parameter(c), d.parameter(c)
    return d.pick(
        f"{d.module(f'nn.InstanceNorm{dims}d({c})')}({x})",
        f"{d.module(f'nn.InstanceNorm{dims}d({c}, affine=True)')}({x})",
        f"F.instance_norm({x}, weight={weight}, bias={bias})",
        f"{d.module(f'nn.BatchNorm{dims}d({c}).eval()')}({x})",
        f"F.batch_norm({x}, torch.linspace(0.1, 0.4, {c}).to({x}.dtype), torch.linspace(0.5, 1.5, {c}).to({x}.dtype), {weight}, {bias})",
        f"F.group_norm({x}, {d.pick(1, 2, c)}, {weight}, {bias})",
        f"{d.module(f'nn.GroupNorm({d.pick(1, 2, c)}, {c})')}({x})",
        f"F.layer_norm({x}.movedim(1, -1), ({c},), {weight}, {bias}).movedim(-1, 1)",
    )  # fmt: skip


@template(3)
def pixels(d: Draw, v: Value) -> None:
    """An image of rows and one to three columns: a convolution, a norm, attention over pixels."""
    n, c = rows(v)
    k = d.pick(1, 1, 2, 3)
    image, out = d.fresh(), d.fresh()
    lines = [d.pick(
        f"{image} = {v.name}.mT.unsqueeze(-1)" + (f".expand(-1, -1, -1, {k}) * {d.parameter(k)}" if k > 1 else ""),
        f"{image} = torch.einsum('bnc,kco->bonk', {v.name}, {d.parameter(k, c, c)})",
        f"{image} = ({v.name} @ {d.parameter(c, c * k)}).unflatten(-1, ({c}, {k})).transpose(1, 2)",
        f"{image} = ({v.name} @ {d.parameter(c, c * k)}).unflatten(-1, ({k}, {c})).permute(0, 3, 1, 2)",
    )]  # fmt: skip
    if d.flag(0.25):  # a picture that the model gets
        n, c, k = H, WIDTH, 3
        lines = [f"{image} = F.conv2d(z, {d.parameter(c, WIDTH, 1, d.pick(1, 3))}, padding='same')"]
    if d.flag(0.25):
        lines.append(f"{image} = {image}.contiguous(memory_format=torch.channels_last)")
    groups = d.pick(1, 1, 2, c)
    if d.flag(0.6):
        kernel = d.parameter(c, c // groups, d.pick(1, 3), d.pick(1, 3))
        padding = "'same'" if d.flag(0.2) else f"({kernel}.shape[2] // 2, {kernel}.shape[3] // 2)"
        lines.append(f"{image} = F.conv2d({image}, {kernel}, padding={padding}, groups={groups})")
    lines.append(f"{image} = {channel_norm(d, c, image)}")
    if d.flag(0.3):
        lines.append(f"{image} = {d.pick('F.relu', 'F.silu', 'F.hardswish')}({image})")
    tokens = d.pick(
        f"{image}.flatten(2).transpose(1, 2)",
        f"{image}.flatten(2).mT",
        f"{image}.reshape(b, {c}, -1).permute(0, 2, 1)",
        f"{image}.permute(0, 2, 3, 1).flatten(1, 2)",
        f"{image}.permute(0, 2, 3, 1).reshape(b, -1, {c})",
    )
    lines.append(f"{image} = {tokens}")
    key = d.parameter(c, c)
    kind = d.pick("first", "all", "heads", "channels", "none")
    if kind == "first":
        lines.append(
            f"{out} = ({image}[:, :1] @ ({image} @ {key}).transpose(1, 2)).softmax(-1) @ {image}"
        )
        d.put(lines, (B, 1, c), out=out)
        return
    if kind == "all":
        lines.append(f"{out} = ({image} @ ({image} @ {key}).mT).softmax(-1) @ {image}")
    elif kind == "heads":
        lines.append(f"{image} = {image}.unflatten(-1, (2, {c // 2})).transpose(1, 2)")
        lines.append(
            f"{out} = F.scaled_dot_product_attention({image}, {image}.sin(), {image}).transpose(1, 2).flatten(2)"
        )
    elif kind == "channels":  # cross-covariance: attention between channels
        lines.append(f"{out} = F.normalize({image} + 2, dim=1)")
        lines.append(f"{out} = {image} @ ({out}.mT @ {out}).softmax(-1)")
    else:
        lines.append(f"{out} = {image} * {image}.softmax(1)")
    d.put(lines, (B, n * k, c), out=out)


@template(1.5)
def image_cut(d: Draw, v: Value) -> None:
    """Rows as patches of an image of width 1, normed and joined again; strides of size-1 dims."""
    n, c = rows(v)
    x = d.pick(f"{v.name}.mT[..., None]", f"{v.name}.mT.unsqueeze(2)", f"{v.name}[:, None].permute(0, 3, 1, 2)",
               f"{v.name}.transpose(1, 2)")  # fmt: skip
    dims = 1 if x.endswith("(1, 2)") else 2
    out = d.fresh()
    lines = [
        f"{out} = {x}",
        f"{out} = {channel_norm(d, c, out, dims)}",
        f"{out} = {out}.flatten(2).mT",
    ]
    d.put(lines, (B, n, c), out=out)


@template(1.5)
def factored(d: Draw, v: Value) -> None:
    """Channels taken apart beside norms and convolutions of other numbers of groups."""
    n, c = rows(v)
    out = d.fresh()
    m = d.pick(8, 16)
    lines = [f"{out} = ({v.name} @ {d.parameter(c, m)}).mT"]
    for _ in range(d.pick(1, 2)):
        groups = d.pick(1, 2, 4, m)
        lines.append(f"{out} = " + d.pick(
            f"F.group_norm({out}, {groups}, {d.parameter(m)}, {d.parameter(m)})",
            f"F.conv1d({out}, {d.parameter(m, m // groups, 3)}, padding=1, groups={groups})",
            f"F.group_norm(F.interpolate({out}, scale_factor=2), {groups})[..., ::2]",
            f"F.conv1d({out}, {d.parameter(m, 1, 3)}, padding=1, groups={m}) + {out}",
        ))  # fmt: skip
    parts = d.pick(2, 4)
    lines.append(f"{out} = " + d.pick(
        f"{out}.unflatten(1, ({parts}, {m // parts})).softmax(2).flatten(1, 2)",
        f"{out}.unflatten(1, ({parts}, {m // parts})).transpose(1, 2).flatten(1, 2)",
        f"{out}.unflatten(1, ({parts}, {m // parts})).cumsum({d.pick(1, 2)}).flatten(1, 2)",
        f"F.glu({out}, 1)",
        f"torch.cat({out}.chunk({parts}, 1)[::-1], 1)",
    ))  # fmt: skip
    width = m // 2 if "glu" in lines[-1] else m
    lines.append(f"{out} = {out}.mT @ {d.parameter(width, WIDTH)}")
    d.put(lines, (B, n, WIDTH), out=out)


@template(1.5)
def again_and_again(d: Draw, v: Value) -> None:
    """One block with its parameters applied two to six times, as in ALBERT."""
    n, c = rows(v)
    out, each = d.fresh(), d.fresh()
    times = d.pick(2, 3, 4, 6)
    w, u, g = d.parameter(c, 2 * c), d.parameter(2 * c, c), d.parameter(c)
    lines = [f"{out} = {v.name}", f"for _ in range({times}):"]
    if d.flag(0.7):
        q = d.parameter(c, c)
        heads = f"({out} @ {q}).unflatten(-1, (2, {c // 2})).transpose(1, 2)"
        causal = d.pick(", is_causal=True", "")
        lines.append(f"    {each} = {heads}")
        lines.append(
            f"    {out} = {out} + F.scaled_dot_product_attention({each}, {each}, {each}{causal}).transpose(1, 2).flatten(2)"
        )
    lines.append(f"    {out} = F.layer_norm({out}, ({c},), {g})")
    act = d.pick("F.gelu", "F.relu", "torch.tanh")
    lines.append(f"    {out} = {out} + {act}({out} @ {w}) @ {u}")
    d.put(lines, (B, n, c), out=out)


@template(1.5)
def filled(d: Draw, v: Value) -> None:
    """Constants of sizes that are computed: of all rows, of twice as many, of one more."""
    n, c = rows(v)

    made = d.pick("torch.zeros({s}, {c}, dtype=torch.float64)", "{v}.new_zeros({s}, {c})", "torch.ones(({s}, {c}))",
                  "torch.full(({s}, {c}), {x}).to(torch.float64)", "{v}.new_full(({s}, {c}), {x})",
                  "torch.arange({s}).unsqueeze(-1).expand(-1, {c}) / ({s})")  # fmt: skip
    x = d.const(0.5, 0.25)
    if d.flag(0.5):
        text = made.format(s=f"b * ({n})", c=c, v=v.name, x=x)
        code = d.pick(f"{text} + {v.name}.flatten(0, 1)", f"torch.cat([{text}, {v.name}.flatten(0, 1)], -1)[:, -{c}:]",
                      f"{v.name}.reshape(-1, {c}) * 0.5 - {text}")  # fmt: skip
        if d.flag(0.5):
            d.put(f"({code}).view(b, {n}, {c})", (B, n, c))
        else:
            d.put(code, (B * n, c))
        return
    length, code = d.pick(
        (n + 1, "torch.cat([{v}, {v}[:, :1]], 1) + {t}"), (2 * n, "torch.cat([{v}, {v}.sin()], 1) + {t}"),
        (n, "{v} + {t}"), (n - 1, "{v}[:, 1:] + {t}"),
    )  # fmt: skip
    if "arange" in made:
        made = "torch.zeros({s}, {c})"
    text = made.format(s=f"b, {length}", c=c, v=v.name, x=x)
    d.put(code.format(v=v.name, t=text), (B, length, c))


@template(1)
def cells(d: Draw, v: Value) -> None:
    """Cells of recurrent nets over a few steps, with a state of every row or of every sample."""
    n, c = rows(v)
    kind = d.pick("GRUCell", "GRUCell", "LSTMCell", "RNNCell")
    cell = d.module(f"nn.{kind}({c}, {c})")
    state, out = d.fresh(), d.fresh()
    new = (
        f"{state}, {out} = {cell}({{x}}, ({state}, {out}))"
        if kind == "LSTMCell"
        else f"{state} = {cell}({{x}}, {state})"
    )
    of_rows = d.flag(0.6)
    first = f"{v.name}.new_zeros(b * ({n}), {c})" if of_rows else f"{v.name}.new_zeros(b, {c})"
    if d.flag(0.3):
        first = f"{v.name}.flatten(0, 1).sin()" if of_rows else f"{v.name}.mean(1)"
    lines = [f"{state} = {first}"]
    if kind == "LSTMCell":
        lines.append(f"{out} = {state}.clone()")
    if of_rows:
        lines += [
            f"for _ in range({d.pick(1, 2, 3)}):",
            "    " + new.format(x=f"{v.name}.flatten(0, 1)"),
        ]
        lines.append(f"{out} = {state}.view(b, {n}, {c})")
        d.put(lines, (B, n, c), out=out)
        return
    steps = d.pick(2, 3)
    t = d.fresh()
    lines += [f"for {t} in range({steps}):", "    " + new.format(x=f"{v.name}[:, {t}]")]
    lines.append(f"{out} = {v.name} + {state}[:, None]")
    d.put(lines, (B, n, c), out=out)


@template(0.02)
def asked(d: Draw, v: Value) -> None:
    """A number read out of a tensor: refused, by the line."""
    number = d.pick("{0}.abs().max().item()", "float({0}.mean())", "{0}.sum().item() * 0.01",
                    "(1.0 if {0}.sum() > 0 else 2.0)", "{0}.mean().tolist()")  # fmt: skip
    d.put(f"{v.name} * {number.format(v.name)}", v.shape)
