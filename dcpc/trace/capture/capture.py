"""Runs `torch.export` on a module with symbolic dims, and returns a canonical forward graph.

The only file that touches torch's tracing API. What comes out is functional (no op writes to its
input, no nested graph, no assertion), keeps composite ops whole (`linear`, `layer_norm`,
`scaled_dot_product_attention`), and returns what is wanted: the loss, or all that forward returns.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import logging
import math
import operator
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dcpc.buckets import Buckets
from dcpc.buckets.specs import InputSpec
from dcpc.errors import TraceError, defined_at, users_line
from dcpc.fx.fakes import telling
from dcpc.fx.garbage import without_collection
from dcpc.fx.large_graphs import source_line
from dcpc.fx.torch_api.tracing import PRINT, QUOTIENTS, SUGGESTIONS, try_names
from dcpc.ir import Program, TensorInfo
from dcpc.trace.canonical.canonical import canonicalise
from dcpc.trace.canonical.losses import spread_row_losses
from dcpc.trace.canonical.single_key import depends_on
from dcpc.trace.capture import dims as named
from dcpc.trace.capture.autocast import casting, share_casts
from dcpc.trace.capture.branches import refuse_batch_of_one, refuse_branches
from dcpc.trace.capture.capturable import Capturable
from dcpc.trace.capture.explain import (
    explained,
    of_experts,
    of_sizes,
    of_values,
    refuse_labels,
    refuse_numbers,
    specialised,
    suggested_least,
    taken_for_numbers,
    with_dims,
)
from dcpc.trace.capture.functional import functional
from dcpc.trace.capture.gradients import (
    detach_without_grad,
    flowing,
    refuse_cut,
    refuse_strangers,
    refuse_writes,
    trainable,
    without_input_writes,
)
from dcpc.trace.capture.module_state import ModuleState, holding, untouched
from dcpc.trace.capture.order import order_preparations
from dcpc.trace.capture.own_backward import own_backwards, refuse_backward_hooks
from dcpc.trace.capture.paths import Paths
from dcpc.trace.formulas.math_of_sizes import math_of_sizes
from dcpc.trace.loss import (
    AllOutputs,
    Loss,
    check_names,
    find_outputs,
    loss_choice,
    mismatch,
    returned,
    returns_statistics,
)
from dcpc.trace.statistics import (
    new_statistics,
    refuse_synchronised,
    running_names,
    with_cumulative,
    with_statistics,
)
from dcpc.trace.tables import refuse_short_tables
from dcpc.trace.value_branches import Branching

_DEVICE = re.compile(r"device\(type='\w+'(?:, index=\d+)?\)")


class _Noted:
    """Facts that one run of forward reveals: changed attributes, choice of the loss, effects.

    `effects` is true if the caller may look for writes to the inputs, `numbers` are the lines that
    read a Python number from a tensor, `checks` those that raise for some values, `dims` the dims
    that torch's symbols stand for. Changes of tensors are not here, and torch.export restores
    lists.
    """

    changes: Sequence[str] = ()
    choice: str = ""
    effects: bool = False
    numbers: Sequence[str] = ()
    checks: Sequence[str] = ()
    dims: Mapping[str, str] = {}


class _WantedOf(nn.Module):
    """Maps positional arguments to the scalar loss in the user's output, or to all its tensors."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Mapping[str, InputSpec],
        loss: Loss | None,
        sides: Branching,
    ) -> None:
        super().__init__()
        self.model = model
        self.sides = sides
        self.inputs = inputs
        # Not as an attribute: a loss that is a module would become a submodule.
        self.returned: Callable[[Mapping[str, Tensor]], Any]
        self.returned = lambda inputs: returned(model, inputs, loss)
        self.mismatch: Callable[[], str] = lambda: mismatch(model, inputs, loss)
        asked = returns_statistics(loss)
        self.statistics = running_names(model, training=True) if asked else ()
        self.noted = _Noted()
        self.refuse_functions: Callable[[Iterable[Tensor]], None] = lambda tensors: None

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        before = ModuleState(self.model)
        declared = zip(args, self.inputs.values(), strict=True)
        sizes = (pair for x, spec in declared for pair in zip(x.shape, spec.dims, strict=True))
        self.noted.dims = {str(n): str(d) for n, d in sizes if isinstance(n, torch.SymInt)}
        with with_cumulative(self.model):
            output = self.returned(dict(zip(self.inputs, args, strict=True)))
        wanted = find_outputs(output, f"the model's forward{defined_at(self.model.forward)}")
        refuse_strangers(wanted)
        self.refuse_functions(wanted)
        after = ModuleState(self.model)
        tensors = {"", *before.kinds, *after.kinds}  # "" is the model itself
        self.noted.changes = before.changes(after, besides=tensors)
        self.noted.choice = loss_choice(output)
        self.noted.effects = isinstance(output, AllOutputs)
        return (*wanted, *new_statistics(self.model)) if self.statistics else wanted


def trace(
    model: nn.Module,
    buckets: Buckets,
    autocast: torch.dtype | None = None,
    loss: Loss | None = None,
) -> Program:
    """Returns the model's forward graph, captured once for all buckets.

    The trace runs on fake tensors and uses no memory for activations. Parameters and buffers on the
    meta device are taken as tensors of the GPU if there is one, else of the CPU.

    Args:
        model: module whose forward takes the buckets' inputs as keyword arguments and returns a
            scalar loss, or a mapping, dataclass or tuple that holds one (`find_loss`).
        buckets: specs of the inputs and ranges of the named dims.
        autocast: dtype of the autocast; None: every op computes in the dtype of its operands.
        loss: function of forward's output and the inputs; None: forward returns the loss.

    Raises:
        TraceError: torch cannot capture the module, the trace fixed a dim, or forward writes to a
            buffer.
    """
    # A hit in torch's cache of fake results costs more than the op: its symbolic sizes and strides
    # are compared and multiplied anew, twice for a view. Without it a trace takes a quarter less.
    try_names()
    sides, refused = Branching(), list[TraceError]()
    while True:
        uncached = torch._dynamo.config.patch(fake_tensor_cache_enabled=False)
        try:
            with uncached, without_collection(), telling(), _meta_as_fake(model):
                program = _traced(model, buckets, autocast, loss, sides)
        except TraceError as error:
            refused.append(error)
            if not sides.turn():
                raise of_experts(refused[0], model) from None
            continue
        if sides.judge(model, buckets, program, loss):
            return dataclasses.replace(program, notes=(*program.notes, *sides.notes()))


def _traced(
    model: nn.Module,
    buckets: Buckets,
    autocast: torch.dtype | None,
    loss: Loss | None,
    sides: Branching,
) -> Program:
    check_names(model, buckets.inputs, loss)
    refuse_backward_hooks(model)
    refuse_synchronised(model)
    named.refuse_names(buckets)
    refused: dict[str, named.ExampleError] = {}  # by the sizes of the trace
    least = named.least_sizes(buckets)
    for hints in named.example_sizes(buckets, named.named_dims(buckets)):
        at = " ".join(f"{n} {size}" for n, size in hints.items())
        while at not in refused:
            wrapped = _WantedOf(model, buckets.inputs, loss, sides)
            wrapped.training = model.training
            try:
                return _traced_at(hints, wrapped, buckets, autocast, least)
            except named.ExampleError as error:
                if least:
                    least = named.longer_sizes(least, error)
                else:
                    refused[at] = error
    first = next(iter(refused.values()))
    raise named.SizeError(f"{first}", first.dims, where=first.where) from first


def _traced_at(
    hints: Mapping[str, int],
    wrapped: _WantedOf,
    buckets: Buckets,
    autocast: torch.dtype | None,
    least: Mapping[str, int],
) -> Program:
    """Returns the program of one trace, at given example sizes.

    Args:
        hints: size of each named dim in the trace.
        wrapped: model with its loss.
        buckets: buckets that the model is captured for.
        autocast: dtype of the autocast; None: every op computes in the dtype of its operands.
        least: shortest length of each dim at which the graph must be right; empty: the smallest
            bucket's.

    Raises:
        ExampleError: the trace assumes something that fails at a bucket, or at the lengths of
            `least`.
        TraceError: the model is refused at any sizes.
    """
    dims = named.named_dims(buckets, least)
    exported, paths = _export(wrapped, buckets, dims, hints, autocast)
    _refuse_mutation(exported, wrapped.statistics)
    gm = copy.deepcopy(exported.graph_module)
    without_input_writes(gm, exported, tuple(buckets.inputs))
    symbols = {n: sympy.Symbol(n, integer=True, positive=True) for n in buckets.names}
    mapping = _symbol_mapping(exported, buckets, symbols, dims)
    assumptions: tuple[sympy.Basic, ...] = ()
    if (env := _shape_env(gm)) is not None:
        assumptions = refuse_branches(env, buckets, symbols, mapping, paths.difference)
        refuse_batch_of_one(buckets, paths.difference)
    reached = depends_on(gm.graph)
    canonicalise(gm)
    order_preparations(gm.graph, exported.graph_signature.inputs_to_parameters.keys())
    gm.graph.lint()
    gm.recompile()
    program = _program(gm, exported, buckets, symbols, mapping, hints, wrapped.noted.numbers)
    program = with_statistics(program, wrapped.statistics)
    refuse_short_tables(program, buckets)
    if least and any(size.has(sympy.Max, sympy.Min) for size in program.sizes):
        raise named.ExampleError("sizes may be simpler from the smallest bucket on")
    zero = frozenset(reached - depends_on(gm.graph)) & program.parameters.keys()
    if wrapped.training and not zero and not wrapped.noted.effects:
        refuse_cut(program)
    from_on = {name: dim.min for name, dim in dims.items()}
    fixed = frozenset.intersection(*(buckets.fixed(b.sizes) for b in buckets))
    program = dataclasses.replace(program, zero_gradients=zero, assumptions=assumptions)
    return dataclasses.replace(program, least=from_on, fixed=fixed)


@contextmanager
def _meta_as_fake(model: nn.Module) -> Iterator[None]:
    """Replaces the model's meta tensors by fake ones within its block.

    They are on the device where `dcpc.materialize` puts the real ones: this process's GPU if it has
    one. The model is not copied: neither tensors that autograd made (`weight_norm`'s weight) nor
    locks can be.
    """
    tensors = [t for t in (*model.parameters(), *model.buffers()) if t.is_meta]
    if not tensors:
        yield
        return
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    fakes: dict[int, Tensor] = {}
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        for t in tensors:
            fake = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
            is_parameter = isinstance(t, nn.Parameter)
            fakes[id(t)] = nn.Parameter(fake, t.requires_grad) if is_parameter else fake
    with untouched(model), holding(model, fakes):
        yield


@contextmanager
def _cudnn_not_asked() -> Iterator[None]:
    """Disables cuDNN where torch chooses attention's kernel for a GPU, within its block.

    torch 2.14 asks cuDNN first for half precision, and its check adds a guard that `batch` is below
    65536, for a kernel that the graph does not use.
    """
    was = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was)


def _export(
    wrapped: _WantedOf,
    buckets: Buckets,
    dims: Mapping[str, Any],
    hints: Mapping[str, int],
    autocast: torch.dtype | None,
) -> tuple[ExportedProgram, Paths]:
    model = wrapped.model
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    args = tuple(named.example_inputs(buckets, hints, device))
    shapes = tuple(named.dynamic_shape(spec, dims) or None for spec in buckets.inputs.values())
    lines: dict[int, str] = {}
    try:
        with (
            warnings.catch_warnings(),
            specialised() as lines,
            casting(device.type, autocast),
            _silent(),
            _quotients(),
            _cudnn_not_asked(),
        ):
            warnings.simplefilter("ignore")
            # Within a caller's no_grad the graph would not say which parts of forward have none.
            with (
                torch.inference_mode(False),
                torch.enable_grad(),
                Capturable(wrapped.sides) as told,
                math_of_sizes(model),
                own_backwards() as wrapped.refuse_functions,
                _suggestions(),
            ):
                exported = torch.export.export(
                    wrapped,
                    args,
                    dynamic_shapes={"args": shapes},
                    strict=False,
                    prefer_deferred_runtime_asserts_over_guards=True,
                )
            wrapped.noted.numbers = told.numbers
            wrapped.noted.checks = told.checks
            paths = Paths(wrapped, exported, buckets, device, autocast, wrapped.sides)
            if wrapped.noted.effects:
                refuse_writes(exported)
            learning = _learning(exported, buckets)
            detach_without_grad(exported, learning)
            for inner in exported.graph_module.modules():  # `with` blocks have graphs of their own
                if isinstance(inner, fx.GraphModule):
                    spread_row_losses(inner.graph)
                    inner.recompile()
            if autocast is None:
                made = functional(exported)
            else:
                made = exported.run_decompositions({})
                share_casts(made.graph, _cached_by_autocast(made))
    except TraceError as error:
        error.args = (with_dims(str(error), wrapped.noted.dims),)
        raise
    except Exception as error:
        wrong = isinstance(error, TypeError) and "argument" in str(error) and wrapped.mismatch()
        if wrong:
            raise TraceError(wrong) from error
        text = with_dims(explained(error, model, buckets, hints), wrapped.noted.dims)
        if not of_values(error):
            again = named.ExampleError if of_sizes(error, buckets, hints) else named.SizeError
            found = taken_for_numbers(error, {n: hints[n] for n in dims}, lines)
            raise again(text, found, suggested_least(error), users_line(error)) from error
        raise TraceError(text) from error
    _warn(wrapped.noted)
    return made, paths


def _warn(noted: _Noted) -> None:
    for line in dict.fromkeys(noted.checks):
        warnings.warn(
            f"forward raises an error for some values{line}: a compiled model does not look at "
            "them, and computes; check values in the dataset, or before the call",
            stacklevel=3,
        )
    if changes := noted.changes:
        warnings.warn(
            f"forward changes its own module ({'; '.join(changes[:4])}): a compiled model does "
            "not, and every call computes what the first one does; pass what changes as an input, "
            "or keep it outside of forward",
            stacklevel=3,
        )
    if noted.choice:
        warnings.warn(noted.choice, stacklevel=3)


@contextmanager
def _quotients() -> Iterator[None]:
    """Lets torch write assertions about sizes that contain quotients of integers or roundings.

    torch 2.13 writes assumptions into the graph by its `PythonReferenceAnalysis`, which lacks the
    quotient, and rounds only numbers, not values of a graph.
    """

    def node(function: Any) -> Any:
        def of(x: Any, *_: Any) -> Any:
            if isinstance(x, fx.Proxy):
                return x.tracer.create_proxy("call_function", function, (x,), {})
            return function(x)

        return staticmethod(of)

    handlers = {
        "int_truediv": staticmethod(operator.truediv),
        "floor_to_int": node(math.floor),
        "ceil_to_int": node(math.ceil),
        "round_to_int": node(round),
    }
    with ExitStack() as stack:
        for name, handler in handlers.items():
            stack.enter_context(QUOTIENTS[name].put(handler))
        yield


@contextmanager
def _suggestions() -> Iterator[None]:
    """Keeps an error in torch's suggestions from failing a correct trace, within its block.

    torch 2.13 writes these suggestions even where there is no error to explain. For rows that are
    padded to pairs it makes a `Dim` of the pairs, which refuses a range of one value: from 10 to 12
    rows the traced odd number has 6 pairs.
    """

    def tolerant(suggest: Callable[..., str]) -> Callable[..., str]:
        def suggested(*args: Any, **kwargs: Any) -> str:
            try:
                return suggest(*args, **kwargs)
            except AssertionError as error:
                return f"{error}"

        return suggested

    with SUGGESTIONS.replaced(tolerant):
        yield


@contextmanager
def _silent() -> Iterator[None]:
    """Keeps torch from printing the whole graph, and tracebacks of failures, in its block."""
    fakes = logging.getLogger("torch._subclasses.fake_tensor")
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")

    def told(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("Unable to find user code")

    logger.addFilter(told)
    was, fakes.disabled = fakes.disabled, True
    try:
        with PRINT.put(lambda *_, **__: None):
            yield
    finally:
        logger.removeFilter(told)
        fakes.disabled = was


def _cached_by_autocast(exported: ExportedProgram) -> set[str]:
    held = exported.graph_signature.inputs_to_parameters
    state = exported.state_dict
    return {
        n for n, t in held.items() if state[t].requires_grad and state[t].dtype == torch.float32
    }


def _learning(exported: ExportedProgram, buckets: Buckets) -> set[str]:
    """Returns the names of the placeholders that require a gradient: parameters and such inputs."""
    given = zip(exported.graph_signature.user_inputs, buckets.inputs.values(), strict=True)
    return trainable(exported) | {str(name) for name, spec in given if spec.learns}


def _refuse_mutation(exported: ExportedProgram, allowed: Sequence[str]) -> None:
    changed = {*exported.graph_signature.buffers_to_mutate.values()}
    mutated = sorted({name.removeprefix("model.") for name in changed} - {*allowed})
    if mutated:
        raise TraceError(
            f"forward changes {len(mutated)} buffers ({', '.join(mutated[:4])}); expected a "
            "forward that only reads them: a batch norm's statistics would be of the micro-batches "
            "of a plan; pass batch_norm='micro' to train batch norms so, put these modules into "
            "eval(), where a batch norm reads what it has, or use GroupNorm or LayerNorm; other "
            "buffers can only be read"
        )


def _symbol_mapping(
    exported: ExportedProgram,
    buckets: Buckets,
    symbols: Mapping[str, sympy.Symbol],
    dims: Mapping[str, Any],
) -> dict[sympy.Symbol, sympy.Expr]:
    values = {node.name: node.meta["val"] for node in exported.graph.nodes if "val" in node.meta}
    pairs = []
    for placeholder, (name, spec) in zip(
        exported.graph_signature.user_inputs, buckets.inputs.items(), strict=True
    ):
        value = values[str(placeholder)]
        pairs += [(f"input '{name}'", d, s) for d, s in zip(spec.dims, value.shape, strict=True)]
    return named.solve_symbols(pairs, symbols, dims)


def _shape_env(gm: fx.GraphModule) -> ShapeEnv | None:
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            for size in value.shape:
                if isinstance(size, torch.SymInt):
                    env: ShapeEnv = size.node.shape_env
                    return env
    return None


def _program(
    gm: fx.GraphModule,
    exported: ExportedProgram,
    buckets: Buckets,
    symbols: Mapping[str, sympy.Symbol],
    mapping: dict[sympy.Symbol, sympy.Expr],
    hints: Mapping[str, int],
    numbers: Sequence[str],
) -> Program:
    signature = exported.graph_signature
    own = signature.inputs_to_parameters, signature.inputs_to_buffers
    parameters, buffers = ({n: t.removeprefix("model.") for n, t in x.items()} for x in own)
    lifted = signature.inputs_to_lifted_tensor_constants
    constants = {n: exported.constants[t] for n, t in lifted.items()}
    inputs = dict(zip(map(str, signature.user_inputs), buckets.inputs, strict=True))
    env = _shape_env(gm)
    flows = flowing(gm.graph, _learning(exported, buckets))
    info: dict[str, TensorInfo] = {}
    cache: dict[sympy.Expr, sympy.Expr] = {}
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            shape = tuple(_size(size, env, mapping, cache) for size in value.shape)
            info[node.name] = TensorInfo(shape, value.dtype, node in flows)
    _assert_all_named(info, symbols, gm.graph)
    refuse_numbers(gm.graph, numbers)
    refuse_labels(gm.graph)
    scalars = {
        node.name: _size(node.meta["val"], env, mapping, cache)
        for node in gm.graph.nodes
        if isinstance(node.meta.get("val"), (torch.SymInt, int))
    }
    outputs: Any = gm.graph.output_node().args[0]
    returned = tuple(n.name for n in outputs)
    begins = tuple(i for i, n in enumerate(returned) if info[n].requires_grad)
    facts = repr([(n, info[n].shape, str(info[n].dtype)) for n in parameters])
    return Program(
        gm=gm,
        parameters=parameters,
        buffers=buffers,
        constants=constants,
        inputs=inputs,
        symbols=dict(symbols),
        info=info,
        scalars=scalars,
        outputs=returned,
        begins=begins,
        hints=dict(hints),
        graph_hash=hash_of(gm.code, facts),
    )


def hash_of(code: str, facts: str) -> str:
    """Returns a hash of a graph, independent of the device, as each rank has its own device."""
    text = _DEVICE.sub("device", code) + facts
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _size(
    size: int | torch.SymInt,
    env: ShapeEnv | None,
    mapping: Mapping[sympy.Symbol, sympy.Expr],
    cache: dict[sympy.Expr, sympy.Expr],
) -> sympy.Expr:
    if not isinstance(size, torch.SymInt):
        return sympy.Integer(size)
    expr = size.node.expr
    if expr not in cache:
        simplified = env.simplify(expr) if env is not None else expr
        cache[expr] = named.plain(simplified, mapping)
    return cache[expr]


def _assert_all_named(
    info: Mapping[str, TensorInfo], symbols: Mapping[str, sympy.Symbol], graph: fx.Graph
) -> None:
    ours = set(symbols.values())
    for name, tensor in info.items():
        for size in tensor.shape:
            extra = size.free_symbols - ours
            if extra:
                line = next(source_line(n) for n in graph.nodes if n.name == name)
                raise TraceError(
                    f"node '{name}'{f' ({line})' if line else ''} has a size that depends on the "
                    f"values in a tensor ({', '.join(map(str, extra))}); expected sizes made of "
                    "the named dims; replace the data-dependent op (nonzero, masked_select, "
                    "unique, boolean indexing) by one with a fixed size, such as torch.where"
                )
