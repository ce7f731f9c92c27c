"""Partitions of small real models, and what they cost when they run: the tests' oracle.

The trace, codegen and runtime phases make partitions for users; here one is made in the plainest
way, so that a mistake of theirs cannot hide one of the profile's.
"""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import sympy
import torch
import torch.nn.functional as F
from torch import fx, is_tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._pytree import tree_leaves

from dcpc.ir import Partition
from examples.allocator import allocated

BATCH = sympy.Symbol("batch", integer=True, positive=True)
SEQ = sympy.Symbol("seq", integer=True, positive=True)
HINTS = {"batch": 3, "seq": 11}
VOCAB = 64


class Block(nn.Module):
    """Pre-norm transformer block with causal attention and a GELU MLP."""

    def __init__(self, width: int, heads: int, mlp: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, mlp * width), nn.Linear(mlp * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, s, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A small GPT that returns its loss."""

    def __init__(self, layers: int = 2, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, width), nn.Embedding(4096, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Mixed(nn.Module):
    """Ops a transformer seldom has: convolution, odd slices, cat, pad, masks, math attention."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, width)
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.gate, self.head = nn.Linear(width, 2 * width), nn.Linear(2 * width, VOCAB)
        self.q, self.group = nn.Linear(width, width), nn.GroupNorm(4, width)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        x = x + self.group(self.conv(x.transpose(1, 2))).transpose(1, 2)
        a, b = self.gate(x).chunk(2, -1)
        x = F.pad((a * b.sigmoid())[:, 1:], (0, 0, 1, 0)) + x.roll(1, 1)
        scores = self.q(x) @ x.transpose(1, 2) / 4
        mask = torch.ones_like(scores, dtype=torch.bool).tril()
        y = scores.masked_fill(~mask, -1e9).softmax(-1) @ x
        y = torch.cat([x, y.to(torch.bfloat16).float()], -1)
        y = torch.where(y > 0, y, 0.1 * y).expand(2, -1, -1, -1).contiguous().mean(0)
        return F.cross_entropy(self.head(y).flatten(0, 1), labels.flatten()) + y.square().mean()


def llama() -> nn.Module:
    """Returns a two-layer transformers Llama that returns its loss."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    return _Loss(LlamaForCausalLM(config))


class _Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, labels=labels).loss


@dataclass(frozen=True)
class Case:
    """A partition with the tensors to run it: parameters, buffers and constants in order."""

    partition: Partition
    state: tuple[torch.Tensor, ...]

    def inputs(self, batch: int, seq: int) -> list[torch.Tensor | int]:
        """Returns the forward's arguments at these sizes."""
        ids = torch.randint(0, VOCAB, (batch, seq))
        return [*self.state, ids, torch.randint(0, VOCAB, (batch, seq)), batch, seq]


@functools.cache
def case(name: str) -> Case:
    """Returns the case of a model by name: `gpt`, `llama`, `mixed`."""
    torch.manual_seed(0)
    models = {"gpt": GPT, "mixed": Mixed, "llama": llama}
    return capture(models[name]())


def capture(model: nn.Module) -> Case:
    """Returns a naive partition of the model's joint graph, symbolic in batch and seq."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gm, state, trainable = _forward_graph(model)
        joint, symbols = _joint_graph(gm, state, trainable)
    names = dict(zip(symbols, (BATCH, SEQ), strict=True))
    return Case(_partition(joint, len(state), names), tuple(state))


def _forward_graph(model: nn.Module) -> tuple[fx.GraphModule, list[torch.Tensor], int]:
    dims = {0: Dim("batch", min=2, max=1024), 1: Dim("seq", min=2, max=4096)}
    args = tuple(torch.zeros(*HINTS.values(), dtype=torch.long) for _ in range(2))
    ep = torch.export.export(
        model,
        args,
        dynamic_shapes=(dims, dims),
        strict=False,
        prefer_deferred_runtime_asserts_over_guards=True,
    ).run_decompositions({})
    graph, signature = ep.graph, ep.graph_signature
    for n in [n for n in graph.nodes if "assert" in str(n.target)]:
        graph.erase_node(n)
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    with graph.inserting_after(placeholders[-1]):
        seq = graph.placeholder("seq_length")
    with graph.inserting_after(placeholders[-1]):
        batch = graph.placeholder("batch_size")
    for n in [n for n in graph.nodes if n.target is torch.ops.aten.sym_size.int]:
        n.replace_all_uses_with((batch, seq)[n.args[1]])
        graph.erase_node(n)
    graph.eliminate_dead_code()
    tensors = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    tensors.update(signature.inputs_to_lifted_tensor_constants)
    known = {**ep.state_dict, **ep.constants}
    state = [known[tensors[n.name]].detach() for n in placeholders[:-2]]
    return fx.GraphModule(ep.graph_module, graph), state, len(signature.inputs_to_parameters)


def _joint_graph(
    gm: fx.GraphModule, state: Sequence[torch.Tensor], trainable: int
) -> tuple[fx.GraphModule, list[sympy.Symbol]]:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    sizes = []
    for name, hint in HINTS.items():
        source = ConstantSource(name)
        symbol = env.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC)
        sizes.append(env.create_symintnode(symbol, hint=hint, source=source))
    fakes = [mode.from_tensor(t, static_shapes=True) for t in state]
    with mode:
        ids = [torch.empty(tuple(sizes), dtype=torch.long) for _ in range(2)]
        tangent = torch.empty(())
    params = [t.requires_grad_() for t in fakes[:trainable]]

    def joint(params, rest, tangent):
        with torch.enable_grad():
            loss = fx.Interpreter(gm).run(*params, *rest)[0]
        return [loss, *torch.autograd.grad([loss], params, [tangent], allow_unused=True)]

    with mode, enable_python_dispatcher():
        trace = make_fx(joint, tracing_mode="real", _allow_non_fake_inputs=True)
        graph = trace(params, [*fakes[trainable:], *ids, *sizes], tangent)
    graph.graph.eliminate_dead_code()
    return graph, [s.node.expr for s in sizes]


def _partition(joint: fx.GraphModule, n_state: int, names: dict) -> Partition:
    """Forward is what the loss needs; all it computes that backward uses is saved."""
    nodes = list(joint.graph.nodes)
    placeholders = [n for n in nodes if n.op == "placeholder"]
    primals, tangent = placeholders[:-1], placeholders[-1]
    loss, *grads = nodes[-1].args[0]
    needed = {loss}
    for n in reversed(nodes):
        if n in needed:
            needed.update(n.all_input_nodes)
    needed |= {n for n in nodes if n.target is operator.getitem and n.args[0] in needed}
    forward = [n for n in nodes if n in needed and n.op != "placeholder"]
    backward = [n for n in nodes[:-1] if n not in needed and n.op != "placeholder"]
    used = {i for n in backward for i in n.all_input_nodes} | {g for g in grads if g is not None}
    saved = [n for n in forward if n in used]
    primals_used = [p for p in primals if p in used]
    return Partition(
        forward=copy_nodes(joint, primals, forward, [loss, *saved]),
        backward=copy_nodes(joint, [*saved, *primals_used, tangent], backward, grads),
        resident=tuple(p.name for p in primals[: n_state + 2]),
        saved=tuple(n.name for n in saved),
        backward_primals=tuple(p.name for p in primals_used),
        names=names,
    )


def copy_nodes(
    joint: fx.GraphModule, inputs: Sequence[fx.Node], body: Sequence[fx.Node], outputs: Sequence
) -> fx.GraphModule:
    """Returns a graph module of some of the nodes of another, with their fake values."""
    graph, env = fx.Graph(), {}
    for n in inputs:
        env[n] = graph.placeholder(n.name)
        env[n].meta = n.meta
    for n in body:
        env[n] = graph.node_copy(n, env.__getitem__)
    graph.output([None if n is None else env[n] for n in outputs])
    return fx.GraphModule(joint, graph)


# ------------------------------------------------------------------------------- running it


def run_freeing(gm: fx.GraphModule, args: list) -> list:
    """Runs a graph node by node, frees each value after its last use, and empties `args` first."""
    return fx.Interpreter(gm, garbage_collect_values=True).boxed_run(args)


def step(case: Case, batch: int, seq: int) -> tuple[torch.Tensor, list]:
    """Runs forward and backward once; returns the loss and the gradients."""
    args = case.inputs(batch, seq)
    return _step(case.partition, args)


def _step(partition: Partition, args: list) -> tuple[torch.Tensor, list]:
    names = [n.name for n in partition.forward.graph.nodes if n.op == "placeholder"]
    primals = [dict(zip(names, args, strict=True))[p] for p in partition.backward_primals]
    with torch.no_grad():
        loss, *saved = run_freeing(partition.forward, list(args))
        args = [*saved, *primals, torch.ones(())]
        del saved, primals
        return loss, run_freeing(partition.backward, args)


def measured_peak_bytes(case: Case, batch: int, seq: int) -> int:
    """Returns the peak of bytes above the arguments, by the profiler's allocator events."""
    args = case.inputs(batch, seq)
    return allocated(lambda: _step(case.partition, args)).peak_bytes


def measured_saved_bytes(case: Case, batch: int, seq: int) -> int:
    """Returns the bytes of the distinct storages of saved values that are not the arguments'."""
    args = case.inputs(batch, seq)
    with torch.no_grad():
        _, *saved = run_freeing(case.partition.forward, list(args))
    resident = {a.untyped_storage()._cdata for a in args if isinstance(a, torch.Tensor)}
    storages = {
        v.untyped_storage()._cdata: v.untyped_storage().nbytes()
        for v in saved
        if isinstance(v, torch.Tensor)
    }
    return sum(size for key, size in storages.items() if key not in resident)


# ---------------------------------------------------------------------------------- node by node


@dataclass(frozen=True)
class Measured:
    """What one call really did.

    Attributes:
        node: the call.
        allocated_bytes: bytes that stay allocated because of it.
        transient_bytes: bytes it held beyond these while it ran.
        shares: for each of its output tensors whether it lies in an input's memory.
    """

    node: fx.Node
    allocated_bytes: int
    transient_bytes: int
    shares: tuple[bool, ...]


class _MeasuringInterpreter(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=True)
        self.measured: list[Measured] = []

    def run_node(self, n: fx.Node):
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        found = allocated(lambda: n.target(*args, **kwargs))
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if is_tensor(t)}
        shares = tuple(
            t.untyped_storage()._cdata in before for t in tree_leaves(found.result) if is_tensor(t)
        )
        besides = found.peak_bytes - found.live_bytes
        self.measured.append(Measured(n, found.live_bytes, besides, shares))
        return found.result


def measure_nodes(case: Case, batch: int, seq: int) -> list[Measured]:
    """Runs forward and backward, each call under a profiler of its own."""
    partition, args = case.partition, case.inputs(batch, seq)
    names = [n.name for n in partition.forward.graph.nodes if n.op == "placeholder"]
    primals = [dict(zip(names, args, strict=True))[p] for p in partition.backward_primals]
    forward = _MeasuringInterpreter(partition.forward)
    backward = _MeasuringInterpreter(partition.backward)
    with torch.no_grad():
        _, *saved = forward.boxed_run(args)
        backward.boxed_run([*saved, *primals, torch.ones(())])
    return forward.measured + backward.measured


def measure_call(function, *tensors: torch.Tensor) -> list[Measured]:
    """Traces a function of tensors and measures each of its calls."""
    gm = make_fx(function, tracing_mode="fake")(*tensors)
    interpreter = _MeasuringInterpreter(gm)
    with torch.no_grad():
        interpreter.boxed_run(list(tensors))
    return interpreter.measured
