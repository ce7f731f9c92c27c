"""Faults below the split: derivatives, what is saved and made again, kernels, caches, calls."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, fx

from dcpc.codegen.variant import build
from dcpc.ir import Partition
from tests.mutants.plant import Mutant, edited, returned

_derive = partial(Mutant, phase="derivatives")
_schedule = partial(Mutant, phase="schedule")
_attention = partial(Mutant, phase="attention")
_cache = partial(Mutant, phase="caches")
_runtime = partial(Mutant, phase="runtime", setting="called")

DERIVATIVES = [
    _derive("a wrong rename of a divisor", setting="scaled", quick=True, plant=edited(
        "codegen.joint.library:_Translation.ops",
        "args=args,", "args=op.args if \"div\" in str(op.target) else args,")),
    _derive("calls with other constants are alike", setting="scaled", plant=edited(
        "codegen.joint.library:_kind_of", "else leaf_key(leaf)",
        "else type(leaf) if isinstance(leaf, float) else leaf_key(leaf)")),
    _derive("a gradient's sum with the one before is dropped", setting="gpt", quick=True,
        plant=edited("codegen.joint.joint:_Assembly._differentiate",
        "for n in wanted if n in self.gradients}",
        "for n in wanted if n in self.gradients and not wanted}")),
    _derive("of two gradients of one operand the last is taken", setting="sums", plant=edited(
        "codegen.joint.joint:_Assembly._differentiate",
        "operand in wanted[:i] and operand in self.gradients", "False")),
    _derive("gradients of two operands exchanged", setting="sums", plant=edited(
        "codegen.joint.joint:_Assembly._differentiate",
        "zip(wanted, derivative.gradients, strict=True)",
        "zip(wanted, derivative.gradients[:: -1 if len({str(n.meta['val'].shape) for n in wanted})"
        " == 1 else 1], strict=True)")),
    _derive("the last call's backward is left out", setting="sums", plant=edited(
        "codegen.joint.joint:_Assembly._backward",
        "if flows:", "if flows and call is not calls[2]:")),
    _derive("a tied parameter's gradient is zero", setting="gpt", plant=edited(
        "codegen.joint.joint:_Assembly._gradient", "return gradient",
        "return None if \"bias\" in name else gradient")),
    _derive("a write through a slice lands one row early", setting="sums", plant=edited(
        "fx.writes:whole", "rule(operand, value, *rest, **view.kwargs)",
        "rule(operand, value, *(r - (len(rest) > 2 and i > 0) for i, r in enumerate(rest)))")),
]  # fmt: skip


def _alike(graph: fx.Graph, nodes: list[fx.Node]) -> tuple[fx.Node, fx.Node] | None:
    """Two nodes whose values have one shape and dtype, the ones that come first."""
    seen: dict[Any, fx.Node] = {}
    for node in nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1:
            key = str(value.shape), value.dtype
            if key in seen and seen[key] is not node:
                return seen[key], node
            seen[key] = node
    return None


def _exchanged(outputs: tuple[Any, ...], pair: tuple[fx.Node, fx.Node]) -> tuple[Any, ...]:
    a, b = pair
    return tuple(b if n is a else a if n is b else n for n in outputs)


def _saved_exchanged(made: Partition) -> Partition:
    output = made.forward.graph.output_node()
    loss, *saved = output.args[0]
    pair = _alike(made.forward.graph, saved)
    if pair is not None:
        output.args = ((loss, *_exchanged(tuple(saved), pair)),)
        made.forward.recompile()
    return made


def _gradients_exchanged(made: Partition) -> Partition:
    output = made.backward.graph.output_node()
    found = tuple(output.args[0])
    pair = _alike(made.backward.graph, [n for n in found if n is not None])
    if pair is not None:
        output.args = (_exchanged(found, pair),)
        made.backward.recompile()
    return made


def _gradient_lost(made: Partition) -> Partition:
    output = made.backward.graph.output_node()
    output.args = ((None, *output.args[0][1:]),)
    made.backward.recompile()
    return made


def _made_again_of_another(made: Partition) -> Partition:
    """The last product that backward makes again takes another operand of the same shape."""
    nodes = list(made.backward.graph.nodes)
    for node in nodes:
        before = [n for n in nodes[: nodes.index(node)] if n.op == "call_function"]
        for operand in node.all_input_nodes if "native_layer_norm" in str(node.target) else ():
            pair = _alike(made.backward.graph, [operand, *before])
            if pair is not None and pair[0] is operand and pair[1] is not operand:
                node.replace_input_with(*pair)
                made.backward.recompile()
                return made
    return made


def _dropped_term(made: Partition) -> Partition:
    """A sum of two gradients is the first of them."""
    for node in made.backward.graph.nodes:
        if str(node.target) == "aten.add.Tensor" and len(node.all_input_nodes) == 2:
            node.replace_all_uses_with(node.args[0])
            made.backward.recompile()
            return made
    return made


SCHEDULE = [
    _schedule("two saved values exchanged", setting="gpt", quick=True, plant=returned(
        build, "partition", _saved_exchanged)),
    _schedule("two gradients exchanged", setting="gpt", plant=returned(
        build, "partition", _gradients_exchanged)),
    _schedule("a gradient lost", setting="gpt", plant=returned(
        build, "partition", _gradient_lost)),
    _schedule("a value is made again of another operand", setting="again", quick=True,
        plant=returned(build, "partition", _made_again_of_another)),
    _schedule("a sum in backward loses a term", setting="again", plant=returned(
        build, "partition", _dropped_term)),
    _schedule("two saved values exchanged on two ranks", setting="gathered 2", plant=returned(
        build, "partition", _saved_exchanged)),
]  # fmt: skip

ATTENTION = [
    _attention("backward of attention without its scale", setting="gpt", quick=True, plant=edited(
        "ops.attention.flash:_backward",
        "sight.after is not None, sight.scale)", "sight.after is not None, 1.0)")),
    _attention("keys before the queries are left out", setting="gathered 2", plant=edited(
        "ops.attention.flash:_split", "min(sight.start, k.shape[2])", "0")),
    _attention("two parts merged by the larger logsumexp", setting="gathered 2", plant=edited(
        "ops.attention.flash:_forward",
        "torch.logaddexp(lse, more_lse)", "torch.maximum(lse, more_lse)")),
    _attention("parts of a ring merged by the larger logsumexp", setting="ring 2", quick=True,
        plant=edited("ops.attention.partial:_merge", "torch.logaddexp(lse, more_lse)",
        "torch.maximum(lse, more_lse)")),
    _attention("a part of a ring is added without its weight", setting="ring 2", plant=edited(
        "ops.attention.partial:_merge", "more.to(out.dtype).mul_(weight)", "more.to(out.dtype)")),
    _attention("gradients of keys and values exchanged", setting="ring 2", plant=edited(
        "ops.attention.partial:Backward.add", "dq, more_k, more_v =", "dq, more_v, more_k =")),
    _attention("a block's window one key too wide", setting="marked", plant=edited(
        "ops.attention.spec:Sight.hidden",
        "distance < -self.before", "distance < -self.before - 1")),
    _attention("a block's keys end one too soon", setting="marked", plant=edited(
        "ops.attention.spec:Sight.keys",
        "position + rows + self.after", "position + rows + self.after - 4")),
    _attention("padding seen by blocks", setting="marked", plant=edited(
        "ops.attention.blocks:_QueryRun.scores",
        "scores.masked_fill_(keep.logical_not(), float(\"-inf\"))", "pass")),
    _attention("rectangles' queries start one key later", setting="marked ring 2", plant=edited(
        "ops.attention.rectangles:_trimmed",
        "low - first, empty", "low - first + 1, empty")),
    _attention("blocks do not tell sequences apart", setting="marked", plant=edited(
        "ops.attention.rectangles:Ids.hidden", "!= mine", "< mine")),
    _attention("a block's gradient without delta", setting="marked", quick=True, plant=edited(
        "ops.attention.blocks:_backward",
        "scores.sub_(delta).mul_(weights)", "scores.mul_(weights)")),
    _attention("padding of another sample", setting="padded", plant=edited(
        "ops.attention.flash:_added",
        "keep[:, None, None, :]", "keep.roll(1, 0)[:, None, None, :]")),
    _attention("a zigzag piece's second run as if it followed the first", setting="zigzag 2",
        plant=edited("ops.attention.spec:Sight.runs",
        "RunOfRows(turn, queries - turn, self.second)",
        "RunOfRows(turn, queries - turn, self.start + turn)")),
]  # fmt: skip

CACHES = [
    _cache("lowered graphs of any placement are one", setting="degrees", quick=True, plant=edited(
        "plan.traced:Traced.lowering", "self.id_of(placement), hints",
        "PlacementId(0, 0), hints")),
    _cache("pieces leave out constants", setting="sums", quick=True, plant=edited(
        "codegen.joint.library:Library.piece", "return leaf_key(leaf)",
        "return type(leaf) if isinstance(leaf, float) else leaf_key(leaf)")),
    _cache("recipes of masks are one", setting="marked", quick=True, plant=edited(
        "codegen.lower.masks:_Applied.value", "if recipe not in self.made:",
        "recipe = next((r for r in self.made if r[0] == recipe[0]), recipe)\n"
        "    if recipe not in self.made:")),
    _cache("pieces of any two roles are one", setting="zigzag 2", plant=edited(
        "codegen.lower.integer_inputs:IntegerNodes.piece", "self.pieces[factor.key, role]",
        "self.pieces[factor.key, \"start\" if role == \"second\" else role]")),
    _cache("a ring's route of other limits", setting="marked ring 2", plant=edited(
        "ops.ring_route:route", "sees(q, k, before, after)", "sees(q, k, 0, 0)")),
]  # fmt: skip

RUNTIME = [
    _runtime("the gradient of the loss is taken for 1", quick=True, plant=edited(
        "codegen.variant.call:VariantCall.arguments",
        "if g is None else g, self.sp)", "if g is None else torch.ones_like(g), 1)")),
    _runtime("saved values in another order", plant=edited(
        "codegen.variant.variant:_RunVariant.forward",
        "saved = tuple(found[: partition.returned]), [*found[partition.returned :]]",
        "saved = tuple(found[: partition.returned]), [*found[partition.returned :]]\n"
        "    a = [i for i, x in enumerate(saved) if x.shape == saved[-1].shape]\n"
        "    saved[a[0]], saved[a[-1]] = saved[a[-1]], saved[a[0]]")),
    _runtime("gradients of other parameters", plant=edited(
        "codegen.variant.variant:_RunVariant.backward",
        "zip(ctx.variant.trainable, found, strict=True)",
        "zip(ctx.variant.trainable, [torch.zeros_like(found[0]), *found[1:]], strict=True)")),
]  # fmt: skip
