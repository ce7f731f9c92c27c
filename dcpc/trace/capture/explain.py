"""Explains why torch cannot capture a module: the error, the source line, and the remedy."""

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from dcpc.buckets import BATCH, Buckets
from dcpc.errors import TraceError, running_line, users_line
from dcpc.fx.large_graphs import op_name, source_line
from dcpc.fx.torch_api.tracing import SPECIALISED

# How torch says that it would have to know the values in a tensor.
_OF_VALUES = ("DataDependent", "data-dependent", "unbacked", "GuardOnData")
_SIZE_LIKE = "Size-like symbols: u"
_CLASS_LOSSES = ("nll_loss", "nll_loss2d", "nll_loss_nd", "cross_entropy_loss")

_CONTROL_FLOW = (
    "control flow that depends on a tensor's values cannot be captured: rewrite it with "
    "torch.where / masking, keep a number as a tensor, or move it out of forward"
)
_SIZE = (
    "a size that depends on values (boolean indexing, nonzero, unique) cannot be captured: keep "
    "the shape, and mask or weight what does not count (torch.where, ignore_index)"
)

# Parts of an error's text -> what to do.
_ADVICE = (
    (
        ("inconsistent min=", "symbolically traced variables"),
        "torch cannot solve what forward computes of a size: use //, * and % of positive sizes, "
        "(n + 3) // 4 * 4 - n for -n % 4",
    ),
    (
        ("Tensor dtype mismatch",),
        "autocast casts within an op of forward that is captured as one: compute it in one dtype, "
        "under torch.autocast(..., enabled=False), or write it with matmul",
    ),
    (
        ("FakeTensor.__format__", ".numpy() is not supported"),
        "forward is captured without values: take what prints or keeps them out of it, or return "
        "them besides the loss (train_step's outputs=)",
    ),
    (
        ("unhashable type: non-nested SymInt",),
        "a length that is made of a tensor's values (the sum of a mask) cannot go into a set or a "
        "dict: take the padded length, which is the same for all samples, and mask",
    ),
    (("ufunc",), "numpy cannot compute with a length: take math, as in math.sqrt(n)"),
)


def explained(
    error: Exception, model: nn.Module, buckets: Buckets, hints: Mapping[str, int]
) -> str:
    """Returns the text of a TraceError: torch's reason, the user's source line, and the remedy."""
    text = str(error)
    where = users_line(error)
    kind, begins = type(error).__name__, "the model cannot be captured: got"
    reason = next((line.strip() for line in text.splitlines() if line.strip()), kind)
    if "Constraints violated" in text or "ConstraintViolation" in kind:
        fixes = [line.strip() for line in text.splitlines() if " = Dim(" in line or " = " in line]
        reason += "; torch suggests " + "; ".join(fixes[:4]) if fixes else ""
        hint = "keep every bucket within that limit, or change the model's limit on this dim"
        hint = _limit_of(text, model) + _recurrent(model) + _numbers(text) + hint
    elif any(s in text + kind for s in _OF_VALUES):
        hint = _experts(model) + (_SIZE if _SIZE_LIKE in text else _CONTROL_FLOW)
    elif advice := next((a for marks, a in _ADVICE if any(m in text for m in marks)), ""):
        hint = advice
    elif not (hint := _passed_on(text, model, buckets)):
        begins = "the model's forward: got" if where else begins
        hint = (
            "see whether the plain model runs with inputs of these specs; if so, "
            "`torch.export.export(model, ..., strict=False)` has to take it, too"
        )
    kind, reason = _in_words(text, kind, reason)
    if _of_shapes(error):
        hint = _multiples(buckets, hints) + hint
    if "resulted in a specialized value" in text:
        hint = (
            "if forward takes a Python int() or range() of a length, write n // 3 or "
            f"math.floor(n / 3) for int(n / 3): torch fixes the length there; {hint}"
        )
    return (
        f"{begins} {kind}: {reason}{where}; expected a forward that is one graph at all sizes; "
        f"{hint}"
    )


def _in_words(text: str, kind: str, reason: str) -> tuple[str, str]:
    """Returns torch's kind of error and its reason, in words where they are symbols of a trace."""
    if "Could not guard on data-dependent" not in text:
        return kind, reason
    made = "a size" if _SIZE_LIKE in text else "a branch, or a number (float(), int(), .item()),"
    return "data-dependent", f"{made} made of the values in a tensor"


def _passed_on(text: str, model: nn.Module, buckets: Buckets) -> str:
    """Returns the remedy for an input that forward's **kwargs pass on, as text; else ""."""
    match = re.search(r"unexpected keyword argument '(\w+)'", text)
    if not match:
        return ""
    takes = inspect.signature(model.forward).parameters
    every = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    if not every or match[1] in takes or match[1] not in buckets.inputs:
        return ""
    return (
        f"{type(model).__name__}.forward takes **kwargs, so each input is passed to it, "
        f"'{match[1]}' too, and what it calls does not take that: name the inputs that forward "
        f"takes instead of **kwargs (a loss=fn that names '{match[1]}' still gets it), or take "
        f"'{match[1]}' out of them in forward"
    )


def with_dims(text: str, dims: Mapping[str, str]) -> str:
    """Returns a text in which named dims stand for torch's symbols, such as `s33`."""
    said = {s: dim if dim.isidentifier() else f"({dim})" for s, dim in dims.items()}
    return re.sub(r"\bs\d+\b", lambda found: said.get(found[0], found[0]), text)


def of_sizes(error: Exception, buckets: Buckets, hints: Mapping[str, int]) -> bool:
    """Returns whether torch's refusal may depend on the example sizes of the trace."""
    return not of_values(error) and not (_of_shapes(error) and _multiples(buckets, hints))


def of_values(error: Exception) -> bool:
    """Returns whether torch's refusal is the same with numbers in the place of all dims."""
    said = str(error) + type(error).__name__
    of_types = isinstance(error, TypeError) and "SymInt" not in said
    return of_types or any(word in said for word in _OF_VALUES)


@contextmanager
def specialised() -> Iterator[dict[int, str]]:
    """Collects the numbers that torch fixes sizes to in its block, with the user's line."""
    found: dict[int, str] = {}

    def noting(replaced: Callable[..., None]) -> Callable[..., None]:
        def noted(env: Any, a: Any, tgt: Any, *rest: Any, **more: Any) -> None:
            if getattr(tgt, "is_Integer", False) and int(tgt) not in found:
                found[int(tgt)] = running_line()
            replaced(env, a, tgt, *rest, **more)

        return noted

    with SPECIALISED.replaced(noting):
        yield found


def taken_for_numbers(
    error: Exception, hints: Mapping[str, int], lines: Mapping[int, str]
) -> dict[str, str]:
    """Returns the dims that torch's error says were fixed, each with ` at FILE:LINE: code` or "".

    Args:
        error: torch's error.
        hints: size of each dim in the trace.
        lines: numbers that sizes were fixed to, with the user's line.
    """
    where = users_line(error)
    said = re.search(r"(?:violated|required) \(([\w, ]+)\)", str(error))
    names = {n.strip(" _") for n in said[1].split(",")} if said else set()
    fixed = {n for n, size in hints.items() if size in lines}
    return {n: lines.get(size) or where for n, size in hints.items() if n in names | fixed}


def suggested_least(error: Exception) -> dict[str, int]:
    """Returns the shortest length of each dim from which on torch says that the trace is right."""
    found = re.findall(r"^\s*(\w+) = Dim\('\1', min=(\d+)", str(error), re.M)
    return {name: int(size) for name, size in found}


def _of_shapes(error: Exception) -> bool:
    """Returns whether torch's error says that a tensor cannot be viewed in a shape."""
    text = str(error)
    view = isinstance(error, IndexError) and "tuple index out of range" in text
    return view or any(said in text for said in ("is invalid for input of size", "% ", "unflatten"))


def _multiples(buckets: Buckets, hints: Mapping[str, int]) -> str:
    """Returns how to declare dims whose lengths are multiples of a number, as text; else ""."""
    found = []
    for dim, hint in hints.items():
        common = math.gcd(*(b.sizes[dim] for b in buckets if dim in b.sizes))
        if dim != BATCH and common > 1 and hint % common:
            found.append(f"{dim} (multiples of {common}, captured at {hint})")
    if not found:
        return ""
    return (
        f"one graph is to serve any length of {', '.join(found)}: if forward divides it by a "
        'number, say so in the specs, such as "float32[batch, seq*2, 8]" with half of each size, '
        "then every length is a multiple; else "
    )


def _limit_of(text: str, model: nn.Module) -> str:
    """Returns which tensors of the model are as long as a limit of torch, as text; else ""."""
    limits = {int(n) for n in re.findall(r"Dim\(.*?max=(\d+)\)", text)}
    tables = [(f"parameter {n}", p) for n, p in model.named_parameters()]
    found = [f"{n} {list(t.shape)}" for n, t in tables if limits & {*t.shape}]
    own = [(n, t) for n, t in _tensors(model) if limits & {*t.shape}]
    grown = [f"{n} {list(t.shape)}" for n, t in own]
    said = ", ".join([*found, *(f"buffer {name}" for name in grown)][:4])
    if not said:
        return ""
    longer = ""
    if grown:
        longer = (
            "a buffer that forward replaces by a longer one has to be long enough before: call the "
            "model once at the largest bucket, then compile; else "
        )
    return f"as long as that limit is {said}: {longer}"


def _recurrent(model: nn.Module) -> str:
    """Returns the remedy for recurrent layers, captured for one length, as text; else ""."""
    found = [n for n, module in model.named_modules() if isinstance(module, nn.RNNBase)]
    if not found:
        return ""
    return (
        f"torch captures a recurrent layer ({', '.join(found[:4])}) step by step, so for one "
        "length alone: give the dim it goes along as a number in the buckets' specs; else "
    )


def of_experts(error: TraceError, model: nn.Module) -> TraceError:
    """Returns an error of forward's own calls, with the remedy for experts in a loop if it has any.

    Args:
        error: error of a capture.
        model: model that was captured.
    """
    remedy, text = _experts(model), str(error)
    if type(error) is not TraceError or not remedy or remedy in text:
        return error
    told, _, advice = text.rpartition("; ")
    return TraceError(f"{told}; {remedy}{advice}")


def _experts(model: nn.Module) -> str:
    """Returns the remedy for experts of transformers that run in a loop, as text; else ""."""

    def loops(module: nn.Module) -> bool:
        way = getattr(getattr(module, "config", None), "_experts_implementation", "")
        return way == "eager" and hasattr(module, "_is_expert_parallel")

    found = [name for name, module in model.named_modules() if loops(module)]
    if not found:
        return ""
    return (
        f"{', '.join(found[:2])}{', ...' if len(found) > 2 else ''} loops over the experts that "
        'tokens chose, so run them as grouped products: model.set_experts_implementation("grouped_'
        'mm"), or experts_implementation="grouped_mm" in from_pretrained or from_config; else '
    )


def _numbers(text: str) -> str:
    """Returns the remedy where forward makes a number of a length, as text; else ""."""
    if not re.search(r"<= (\d+)\b.*?\b\w+ = \1$", text, re.M | re.S):
        return ""
    return (
        "if forward loops over that dim in Python (range(n), for row in x, .tolist()), compute all "
        "of it in one call; if it makes a number of that length (float(n), another function of "
        "math than sqrt, log, exp and sin, numpy), write n * 1.0, n**0.5 or math.log(n); else "
    )


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) of buffers and of tensors that are plain attributes of modules."""
    yield from model.named_buffers()
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                yield f"{prefix}.{name}".lstrip("."), value


def refuse_numbers(graph: fx.Graph, lines: Sequence[str]) -> None:
    """Refuses Python numbers that forward read from a tensor (`item()`) and computes with.

    Raises:
        TraceError: there is such a number; the message names it with its line.
    """
    for node in graph.nodes:
        if op_name(node) in ("item", "_local_scalar_dense") and node.users:
            line = source_line(node)
            where = f" ({line})" if line else " and".join(dict.fromkeys(lines))
            raise TraceError(
                f"node '{node.name}' of '{node.args[0]}'{where} is a Python "
                "number made of the values in a tensor (.item(), float() or int() of one); "
                "expected numbers that follow from lengths alone, as forward is captured once, "
                "without values; leave .item() out: a tensor without dims takes the number's place"
            )


def refuse_labels(graph: fx.Graph) -> None:
    """Refuses class labels of a dtype that torch's losses do not take, though Inductor does.

    Raises:
        TraceError: a loss has such labels, which the message names with its line.
    """
    for node in graph.nodes:
        if op_name(node) not in _CLASS_LOSSES or not isinstance(node.args[1], fx.Node):
            continue
        dtype = node.args[1].meta["val"].dtype
        if dtype.is_floating_point or dtype in (torch.int64, torch.uint8):
            continue
        line = source_line(node)
        raise TraceError(
            f"node '{node.name}'{f' ({line})' if line else ''} has labels "
            f"'{node.args[1].name}' of {dtype}; expected torch.int64, as the plain model does; "
            "declare them as int64 in the buckets' inputs, or pass labels.long() to the loss"
        )
