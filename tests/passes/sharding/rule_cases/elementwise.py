"""Elementwise ops: their arguments are drawn from the schema, their dtypes by trying."""

from typing import Any

import torch

from dcpc.passes.sharding.rules import rule_table
from tests.passes.sharding.rule_cases.source import DTYPES, Source, aten, strategy
from tests.passes.sharding.rule_check import Case

SKIPPED = ("out", "names", "Scalar_out", "complex")
GIVEN: dict[str, tuple[Any, ...]] = {
    "rounding_mode": (None, "trunc", "floor"), "decimals": (1,), "dtype": DTYPES,
    "approximate": ("none", "tanh"), "alpha": (1, 2), "value": (1, 2),
}  # fmt: skip
OVERLOADS = {"to": ("dtype",), "floor_divide": ("default", "Scalar")}


def overloads(source: Source) -> list[Any]:
    """Overloads whose arguments are tensors and numbers."""
    names = OVERLOADS.get(source.op.removeprefix("aten."), source.packet.overloads())
    found = []
    for name in names:
        op = getattr(source.packet, name)
        arguments = op._schema.arguments
        kinds = [str(a.type) for a in arguments]
        is_out = any(a.is_out or (a.alias_info and a.alias_info.is_write) for a in arguments)
        is_out = is_out or [str(r.type) for r in op._schema.returns] != ["Tensor"]
        if not is_out and "Tensor" in kinds and not {"int", "complex"} >= set(kinds):
            found.append(op)
    return found


def drawn(source: Source, argument: Any, shape: list[int], dtype: torch.dtype) -> Any:
    kind, name = str(argument.type), argument.name
    if name in ("condition", "mask"):
        return source.tensor(*source.broadcast(shape), dtypes=(torch.bool,))
    if name in GIVEN and (name != "dtype" or kind != "Optional[int]" or source.op == "aten.to"):
        return source.pick(*GIVEN[name])
    if name == "value" and kind == "Tensor":
        return source.tensor(dtypes=(dtype,))
    if "Tensor" in kind:
        tensor = source.tensor(*source.broadcast(shape), dtypes=(dtype,))
        shift = "shift" in source.op and name == "other" and dtype == torch.int64
        return tensor.abs() if shift else tensor
    if name in ("min", "max", "min_val", "max_val"):
        return -1 if name.startswith("min") else 1
    return source.pick(1, 2)


def pointwise(source: Source) -> Case:
    op = source.pick(*overloads(source))
    shape = source.shape(0, 3)
    tensors = sum("Tensor" in str(a.type) for a in op._schema.arguments)
    for dtype in (source.pick(*DTYPES), *DTYPES):
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for a in op._schema.arguments:
            wanted = a.name in ("min", "max") or (a.name in GIVEN and source.flag())
            if a.has_default_value() and not wanted:
                if a.kwarg_only:
                    continue
                value = a.default_value
            elif "Tensor" in str(a.type) and (
                tensors == 1 or (source.op == "aten.copy" and not args)
            ):
                value = source.tensor(*shape, dtypes=(dtype,))
            elif a.name == "value" and str(a.type) == "Tensor":
                value = source.tensor(dtypes=(dtype,))
            else:
                value = drawn(source, a, shape, dtype)
            if a.kwarg_only:
                kwargs[a.name] = value
            else:
                args.append(value)
        case = Case(op, tuple(args), kwargs, has_values=source.op != "aten.empty_like")
        try:
            case.run()
        except (RuntimeError, TypeError, NotImplementedError):
            continue
        return case
    raise AssertionError(f"{op} takes no dtype")


POINTWISE = [
    op for op, line in rule_table().items()
    if line.kind == "pointwise" and op not in ("aten._to_copy", "aten.frexp", "aten._conj")
]  # fmt: skip
strategy(*POINTWISE)(pointwise)


@strategy("aten._to_copy")
def cast(source: Source) -> Case:
    x = source.tensor(*source.shape(0), dtypes=DTYPES)
    return Case(torch.ops.aten._to_copy.default, (x,), {"dtype": source.pick(*DTYPES)})


@strategy(*(op for op, line in rule_table().items() if line.kind == "elementwise_loss"))
def loss(source: Source) -> Case:
    shape = source.shape(1, 3)
    x, y = (torch.rand(shape, dtype=torch.float64, generator=source.generator) for _ in "xy")
    args: dict[str, Any] = {}
    for a in source.packet.default._schema.arguments[2:]:
        optional = source.floats(*source.broadcast(shape)) if "Tensor" in str(a.type) else None
        args[a.name] = {"reduction": 0}.get(a.name, a.default_value)
        if optional is not None and source.flag():
            args[a.name] = optional
    if source.op == "aten.hinge_embedding_loss":
        y = source.below(2, *shape) * 2 - 1
    if source.op == "aten.margin_ranking_loss":
        args["target"] = source.below(2, *shape) * 2 - 1
    if "poisson" in source.op:
        args |= {"log_input": True, "full": False, "eps": 1e-8}
    kwargs = {"log_target": args.pop("log_target")} if "log_target" in args else {}
    return Case(source.packet.default, (x, y, *args.values()), kwargs)


@strategy("aten.fill")
def fill(source: Source) -> Case:
    x = source.tensor(*source.shape(0))
    if source.flag():
        return Case(aten.fill.Tensor, (x, source.tensor(dtypes=(x.dtype,))))
    return Case(aten.fill.Scalar, (x, 2))


@strategy("aten.zeros", "aten.ones", "aten.empty", "aten.full")
def filled(source: Source) -> Case:
    op = aten.empty.memory_format if source.op == "aten.empty" else source.packet.default
    value = (3,) if source.op == "aten.full" else ()
    shape = source.shape(1, 3)
    kwargs = {"dtype": torch.int64}
    return Case(op, (shape, *value), kwargs, has_values=source.op != "aten.empty")


@strategy("aten.new_zeros", "aten.new_ones", "aten.new_full", "aten.new_empty")
def newly_filled(source: Source) -> Case:
    value = (3,) if source.op == "aten.new_full" else ()
    args = (source.tensor(*source.shape(0)), source.shape(), *value)
    return Case(source.packet.default, args, has_values=source.op != "aten.new_empty")


@strategy("dcpc.uniform", "dcpc.normal")
def random(source: Source) -> Case:
    args = (source.shape(), 7, 0, 0, torch.float64, torch.device("cpu"))
    return Case(source.packet.default, args, has_values=False)  # a piece has numbers of its own


@strategy("aten.scalar_tensor")
def number(source: Source) -> Case:
    return Case(aten.scalar_tensor.default, (2,))


@strategy("aten.arange")
def arange(source: Source) -> Case:
    n = source.size(1, 9)
    if source.flag():
        return Case(aten.arange.default, (n,))
    if source.flag():
        return Case(aten.arange.start, (2, 2 + n))
    return Case(aten.arange.start_step, (0, n, source.pick(1, 2)))
