"""The backend function: reads options, compiles, and falls back where dcpc refuses a graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch._dynamo
import torch.utils._pytree as pytree
from torch import fx

from dcpc.dynamo.family import Family
from dcpc.dynamo.numbers import fix_numbers
from dcpc.dynamo.regions import without_regions
from dcpc.errors import DcpcError, PlanError, check_choice
from dcpc.plan.options import CompileOptions

FALLBACKS = ("inductor", "eager", "error")


def backend(
    gm: fx.GraphModule, examples: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Returns a callable for a graph of `torch.compile(model, backend="dcpc", options={...})`.

    Lengths that Dynamo keeps symbolic (`dynamic=True`, `torch._dynamo.mark_dynamic`) stay symbolic
    here: a new length needs at most another variant, and no new capture.

    Args:
        gm: graph module from Dynamo.
        examples: arguments of the first call.
        options: options of `dcpc.compile` except `group` (`sp` and `parameters` are for one rank:
            Dynamo sees one) and `batch_norm`; `buckets`, a `dcpc.Buckets` of forward's arguments,
            for whose sizes recompute is planned, by default the first call's and the largest that
            `mark_dynamic` allows; `fallback`, the compiler of a graph that dcpc refuses: "inductor"
            (the default, with a warning that says why), "eager" or "error".

    Raises:
        DcpcError: the graph is refused, with `fallback="error"`.
        PlanError: an option is not possible.
        TensorifyScalarRestartAnalysis: raised for Dynamo, see `fix_numbers`.
    """
    given = dict(options or {})
    fallback, buckets = given.pop("fallback", "inductor"), given.pop("buckets", None)
    check_choice("torch.compile(backend='dcpc'): got fallback=", fallback, FALLBACKS)
    known = {*CompileOptions.__dataclass_fields__} - {
        *("group", "sp", "parameters", "pipeline", "batch_norm"),
    }
    if unknown := sorted(given.keys() - known):
        raise PlanError(
            f"torch.compile(backend='dcpc'): got options {', '.join(unknown)}; expected some of "
            f"buckets, fallback, {', '.join(sorted(known))}; for ranks use dcpc.compile"
        )
    chosen = CompileOptions(**given)
    values = pytree.tree_leaves([n.meta.get("example_value") for n in gm.graph.nodes])
    if not any(isinstance(v, torch.Tensor) and v.is_floating_point() for v in values):
        return gm.forward  # of integers alone: nothing to recompute, nothing to compare
    plain = without_regions(gm)
    fix_numbers(plain)
    try:
        family = Family(plain, examples, chosen, buckets)
        family.call(examples)
    except DcpcError as error:
        if fallback == "error":
            raise
        _warn(f"{error}; this graph is compiled by '{fallback}'")
        other: Any = torch._dynamo.lookup_backend(fallback)
        return other(gm, examples)  # type: ignore[no-any-return]

    def run(*given: Any) -> Any:
        try:
            call = family.call(given)
        except DcpcError as error:
            if fallback == "error":
                raise
            _warn(f"{error}; at these lengths the captured graph runs as it is")
            return gm(*given)
        return family.run(call, given)

    return run


def _warn(problem: str) -> None:
    warnings.warn(f"torch.compile(backend='dcpc'): {problem}", stacklevel=3)
