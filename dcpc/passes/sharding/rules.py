"""The rule table and its interpreter: node -> `OpSharding`."""

from __future__ import annotations

import re
import reprlib
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Annotated, Any

import sympy
import torch
import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from torch import fx

from dcpc.errors import RuleError, check_choice, checking_call
from dcpc.ir import TensorInfo, call_of, tensor_operands
from dcpc.ops.own_functions import is_function
from dcpc.ops.tiled import tiling_of
from dcpc.passes.sharding.derive import DerivedRules
from dcpc.passes.sharding.notation import Pattern, bind
from dcpc.passes.sharding.op_kinds import KINDS, VIEW_KINDS, OpCall, arguments
from dcpc.passes.sharding.rule_types import Linear, Names, OpSharding


def _words(value: object) -> object:
    return tuple(value.replace(",", " ").split()) if isinstance(value, str) else value


class Rule(BaseModel):
    """One line of the table."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rule: str | None = None
    kind: str | None = None
    whole: Annotated[tuple[str, ...], BeforeValidator(_words)] = ()
    sum: Annotated[tuple[str, ...], BeforeValidator(_words)] = ()
    linear: Linear = "none"
    bias: int | None = None
    along: str = "dim"
    multiplies: bool = False
    reason: str = ""


REGISTERED: dict[str, Rule] = {}
_TILED = Rule(kind="tiled")


@checking_call("dcpc.register_sharding_rule", RuleError)
def register_sharding_rule(
    op: str, rule: str, *, whole: str = "", sum: str = "", linear: Linear = "none"
) -> None:
    """Adds the sharding rule of an op, for every model compiled from here on.

    Example:
        dcpc.register_sharding_rule("mylib::scan", "b l d -> b l d", whole="l")

    Args:
        op: `namespace::name` or `namespace.name`; the rule is for all overloads.
        rule: `operands -> output`, one name a dim, see `dcpc/passes/sharding/notation.py`.
        whole: names, separated by spaces, of which no rank may have a piece.
        sum: contracted names whose pieces add up to the result.
        linear: how partial sums pass through the op: "none", "one", "all" or "first".

    Raises:
        RuleError: the notation is wrong, or a name of `whole` or `sum` is not in the rule.
    """
    words = {"rule": rule, "whole": whole, "sum": sum, "linear": linear}
    odd = [n for n, text in {"op": op, **words}.items() if not isinstance(text, str)]
    if odd or not re.fullmatch(r"\w+(::|\.)\w+", op):
        got = {"op": op, **words}[odd[0]] if odd else op
        raise RuleError(
            f"register_sharding_rule: got {odd[0] if odd else 'op'}={reprlib.repr(got)}; expected "
            "texts, the op as namespace::name or namespace.name; correct it, such as 'mylib::scan'"
        )
    parsed = _line(op, {"rule": rule, "whole": whole, "sum": sum, "linear": linear})
    REGISTERED[op.replace("::", ".")] = parsed


def _line(op: str, fields: Mapping[str, Any]) -> Rule:
    try:
        line = Rule.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where, got = ".".join(map(str, first["loc"])), reprlib.repr(first["input"])
        raise RuleError(
            f"sharding rule of {op}: {where}: got {got}; expected: {first['msg'].lower()}; correct "
            "this line"
        ) from error
    if sum((line.rule is not None, line.kind is not None, bool(line.reason))) != 1:
        raise RuleError(
            f"sharding rule of {op}: got {line.model_dump(exclude_unset=True)}; expected one of "
            "rule:, kind: and reason:; give one of them"
        )
    if line.kind is not None:
        check_choice(f"sharding rule of {op}: got kind=", line.kind, KINDS, RuleError)
    if line.rule is not None:
        pattern = Pattern.parse(line.rule)
        unknown = ({*line.whole, *line.sum}) - pattern.names()
        if unknown:
            raise RuleError(
                f"sharding rule of {op}: got {', '.join(sorted(unknown))} in whole/sum; expected "
                f"names of '{line.rule}'; correct them"
            )
        lost = _only_in_operands(pattern) - {*line.whole, *line.sum}
        if lost:
            raise RuleError(
                f"sharding rule of {op}: got {', '.join(sorted(lost))} in an operand of "
                f"'{line.rule}' but not in the output; expected it in sum= or whole=; say sum= if "
                "its pieces add up, else whole="
            )
        both = {*line.whole} & {*line.sum}
        if both:
            raise RuleError(
                f"sharding rule of {op}: got {', '.join(sorted(both))} in both whole and sum; "
                "expected it in one: what has pieces that add up is not whole; leave one out"
            )
    return line


def _only_in_operands(pattern: Pattern) -> set[str]:
    output = {n.lstrip("*") for d in pattern.output for n in d.strip("()").split()}
    return pattern.names() - output


@cache
def _shipped() -> dict[str, Rule]:
    text = files("dcpc.passes.sharding").joinpath("sharding_rules.yaml").read_text(encoding="utf-8")
    table = yaml.safe_load(text)
    return {op: _line(op, fields) for op, fields in table.items()}


def rule_table() -> dict[str, Rule]:
    """Returns op -> rule for all ops; the user's rules override the shipped ones."""
    return {**_shipped(), **REGISTERED}


def op_name(node: fx.Node) -> str:
    """Returns the name of a call's op without its overload, e.g. `aten.linear`."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet is not None:
        return str(packet)
    module = getattr(node.target, "__module__", "")
    return f"{module}.{getattr(node.target, '__name__', node.target)}"


def op_sharding(
    node: fx.Node, info: Mapping[str, TensorInfo], derived: DerivedRules | None = None
) -> OpSharding:
    """Returns the sharding rule of one call; everything is replicated if there is none.

    Args:
        node: node of the call, or a getitem of its results.
        info: tensor info of every value.
        derived: finder of rules for ops without a line; None: such ops are replicated.
    """
    operands = tuple(info[n.name] for n in tensor_operands(node, info))
    output, call_node = info[node.name], call_of(node)
    op = op_name(call_node)
    line = _TILED if tiling_of(call_node.target) else rule_table().get(op)
    if line is None:
        return _derived(node, op, operands, output, derived)
    if line.reason:
        reason = f"{op}: {line.reason}"
        return replace(_replicated(operands, output.shape, reason), deliberate=True)
    try:
        args = arguments(call_node)
        if line.kind is not None:
            result = node.args[1] if call_node is not node else 0
            assert isinstance(result, int)
            call = OpCall(call_node, operands, output, args, line.linear, line.along, result)
            sharding = replace(KINDS[line.kind](call), is_view=line.kind in VIEW_KINDS)
        else:
            sharding = _from_pattern(line, args, operands, output)
    except (NotImplementedError, RuleError) as error:
        return _replicated(operands, output.shape, f"{op}: {error}")
    sharding = replace(sharding, whole_gradient=is_function(call_node.target))
    return _only_valid(_only_sums(sharding, operands, output))


def _derived(
    node: fx.Node,
    op: str,
    operands: tuple[TensorInfo, ...],
    output: TensorInfo,
    rules: DerivedRules | None,
) -> OpSharding:
    """Returns the rule derived from the op's results; replicated if none can be derived."""
    reason = f"no sharding rule for {op}"
    found = "" if rules is None else rules.find(node, op, operands, output)
    if isinstance(found, str):
        reason += f", and none was derived: {found}" if found else ""
        whole = _replicated(operands, output.shape, reason)
        return replace(whole, whole_gradient=is_function(call_of(node).target))
    fields = {"rule": found.rule, "whole": found.whole, "sum": found.sum, "linear": found.linear}
    line = _line(op, fields | {"multiplies": bool(found.sum)})
    sharding = _from_pattern(line, {}, operands, output)
    if not found.takes_empty:
        sharding = replace(sharding, nonempty=frozenset(sharding.sizes))
    sharding = replace(sharding, whole_gradient=not found.adds_up)
    return _only_valid(_only_sums(sharding, operands, output))


def _from_pattern(
    line: Rule, args: Mapping[str, Any], operands: tuple[TensorInfo, ...], output: TensorInfo
) -> OpSharding:
    assert line.rule is not None
    pattern = Pattern.parse(line.rule)
    given = [a for a in args.values() if isinstance(a, fx.Node)]
    present = pattern.operands[: len(operands)]
    pattern = replace(pattern, operands=present)
    names, out, sizes = bind(pattern, [o.shape for o in operands], output.shape)
    biased = line.bias is not None and line.bias < len(given)
    summed = frozenset() if biased else frozenset(line.sum) & sizes.keys()
    whole = frozenset(line.whole) | (frozenset(line.sum) - summed)
    linear: Linear = "none" if biased else line.linear
    return OpSharding(
        names, out, sizes, whole & sizes.keys(), summed, linear, multiplies=line.multiplies
    )


def _only_sums(
    sharding: OpSharding, operands: tuple[TensorInfo, ...], output: TensorInfo
) -> OpSharding:
    """Removes partial sums of booleans, and of numbers that are rounded to integers."""
    inexact = [o.dtype.is_floating_point or o.dtype.is_complex for o in operands]
    rounds = any(inexact) and not (output.dtype.is_floating_point or output.dtype.is_complex)
    booleans = any(o.dtype == torch.bool for o in operands) or output.dtype == torch.bool
    if booleans or rounds:
        sharding = replace(sharding, linear="none")
    if output.dtype == torch.bool and sharding.summed:
        whole = sharding.whole | sharding.summed
        sharding = replace(sharding, whole=whole, summed=frozenset())
    return sharding


def _only_valid(sharding: OpSharding) -> OpSharding:
    """Makes names whole that occur twice in one tensor (a diagonal), as they cannot be split."""
    tensors = (*sharding.operands, sharding.output)
    counts = [Counter(name for dim in tensor for name in dim) for tensor in tensors]
    twice = {name for count in counts for name, times in count.items() if times > 1}
    return replace(sharding, whole=sharding.whole | twice) if twice else sharding


def _replicated(
    operands: tuple[TensorInfo, ...], output: tuple[sympy.Expr, ...], reason: str
) -> OpSharding:
    def unnamed(shape: tuple[sympy.Expr, ...]) -> Names:
        return tuple(() for _ in shape)

    return OpSharding(tuple(unnamed(o.shape) for o in operands), unnamed(output), {}, reason=reason)


def warn_replicated(reasons: Mapping[str, list[str]]) -> None:
    """Warns once for each op that is replicated, with the reason."""
    for reason, nodes in reasons.items():
        warnings.warn(
            f"{len(nodes)} node{'s' if len(nodes) > 1 else ''} ({', '.join(nodes[:3])}"
            f"{', ...' if len(nodes) > 3 else ''}) stay replicated on every rank: {reason}; add a "
            "line with dcpc.register_sharding_rule(op, 'operands -> output')",
            stacklevel=5,
        )


def warn_derived(derived: Mapping[str, Mapping[str, list[str]]]) -> None:
    """Warns once for each op split by a derived, unproved rule, with the line to add."""
    for op, lines in derived.items():
        nodes = [name for names in lines.values() for name in names]
        warnings.warn(
            f"{op} ({', '.join(nodes[:3])}{', ...' if len(nodes) > 3 else ''}) has no "
            "sharding rule: it is split by one derived from runs on small pieces, not proved: "
            f"{'; '.join(lines)}; check it against what the op means and register it with "
            "dcpc.register_sharding_rule, or pass derive_rules=False to replicate the op",
            stacklevel=5,
        )
