"""Live memory of a forward and a backward at every program point.

    node        allocates its outputs' storages (a view allocates none), and its transient
                -> a program point: live + transient
    last use    of all values in a storage -> the storage is freed

Forward's placeholders (parameters, buffers, inputs) are resident and not counted. After forward the
loss and the saved values live; backward frees a saved value after its last use; gradients live to
the end, or as long as other values where they are taken at once. So do the gradients passed to
backward, as its caller holds them. Sizes are those of storages, not of shapes: a saved slice keeps
the whole tensor it is cut from. Copies of a block that stand for more: `events.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import sympy
from torch import fx

from dcpc.fx.leaves import is_symbolic
from dcpc.ir import Fold
from dcpc.symbolic_profile.memory.events import Folding, Kept, Recorder
from dcpc.symbolic_profile.memory.lifetimes import Lifetimes, Numbered
from dcpc.symbolic_profile.memory.run import RankRun
from dcpc.symbolic_profile.ops.facts import Facts, op_name
from dcpc.symbolic_profile.ops.fused.fusion import fuse
from dcpc.symbolic_profile.polynomials import Basis, Floats, Integers

GATHER = "dcpc::gather_rows"


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """Live bytes at each program point, as sums over numbered sizes.

    Attributes:
        sizes: the distinct sizes.
        steps: number of the size of each allocation or free.
        weights: 1 for an allocation, -1 for a free; times the copies that it stands for.
        storages: storage of each allocation or free.
        done: steps done at each point.
        transients: number of the size of each point's transient.
        names: node of each point.
        saved: size -> its number among the saved values' distinct storages.
        gradients: size -> its number among the outputs of backward.
        returned: size -> its number among the outputs of forward that backward does not read.
        shared: size -> its number among the outputs of forward that backward reads, too.
    """

    sizes: tuple[sympy.Expr, ...]
    steps: Integers
    weights: Integers
    storages: tuple[int, ...]
    done: Integers
    transients: Integers
    names: tuple[str, ...]
    saved: Mapping[sympy.Expr, int]
    gradients: Mapping[sympy.Expr, int]
    returned: Mapping[sympy.Expr, int]
    shared: Mapping[sympy.Expr, int]

    def live(self, values: Any) -> Any:
        """Returns the live bytes of each point, `[points]` or `[points, n]`.

        Args:
            values: bytes of the sizes, `[sizes]` or `[sizes, n]`: n numbers, or n coefficients.
        """
        taken = values[self.steps]
        weights = self.weights if taken.ndim == 1 else self.weights[:, None]
        start = np.zeros((1, *values.shape[1:]), dtype=values.dtype)
        live = np.concatenate([start, np.cumsum(taken * weights, axis=0, dtype=values.dtype)])
        return live[self.done] + values[self.transients]


def live_rows(timeline: MemoryTimeline) -> tuple[Floats, Basis]:
    """Returns the live bytes at each point, as a row over the basis of all sizes."""
    basis = Basis(timeline.sizes)
    return timeline.live(basis.matrix(timeline.sizes)), basis


def timeline_of(
    run: RankRun,
    numbered: Numbered,
    fold: Fold | None = None,
    fuses: bool = False,
    stays: frozenset[int] | None = None,
) -> MemoryTimeline:
    """Returns the allocations and frees of a run.

    Args:
        run: the calls of one rank.
        numbered: numbers of their nodes.
        fold: folded blocks and their copies; None: nothing is folded.
        fuses: whether the backend fuses pointwise calls into kernels, as Inductor does.
        stays: numbers of the gradients that live to the end, where the others are taken and freed
            as soon as backward has made them; None: all do.
    """
    again = set(run.forward)
    if stays is not None:
        run = replace(run, gradients=tuple(g for n, g in enumerate(run.gradients) if n in stays))
    outputs = [g for g in run.gradients if g is not None]
    held = [t for t in run.tangents if t.meta["val"].ndim]  # a loss's is a scalar
    run = replace(run, gradients=(*outputs, *held))
    kept = _kept(fold, run.backward, numbered)
    recorder = Recorder()
    if fuses:
        forward: Any = fuse(run.forward, [*run.outputs, *run.saved], numbered.facts)
        backward: Any = fuse(run.backward, outputs, numbered.facts)
        run = replace(run, forward=forward, backward=backward)
    storages = Lifetimes(run, numbered, recorder)
    storages.forward(Folding.forward(fold, run.forward, kept))
    returned = {storage for _, storage, _ in storages.of(run.outputs)}
    taken = {storage for _, storage, _ in storages.of(run.saved)}
    sent = [
        _distinct(run.outputs, storages, recorder.resident | others, fold)
        for others in (taken, returned - taken)
    ]
    saved = Counter(_distinct(run.saved, storages, recorder.resident | returned, fold))
    for each in kept.values():
        for size in numbered.expressions(np.array(each.sizes)):
            saved[size] += each.times
    storages.start_backward()
    storages.backward(Folding.backward(fold, run.backward, again, fuses, kept))
    # Those of inputs have the inputs' sizes; a parameter's is fixed.
    fixed = [g for g in outputs if not any(map(is_symbolic, g.meta["val"].shape))]
    gradients = _distinct(fixed, storages, set(), fold)
    return _recorded(recorder, numbered, saved, gradients, *sent)


def _recorded(
    recorder: Recorder, numbered: Numbered, *outputs: Mapping[sympy.Expr, int]
) -> MemoryTimeline:
    """Returns the recorded timeline; `outputs` are its fields from `saved` on."""
    numbers = np.array([0, *recorder.steps, *recorder.transients], dtype=np.int64)
    used, place = np.unique(numbers, return_inverse=True)
    end = 1 + len(recorder.steps)
    return MemoryTimeline(
        tuple(numbered.expressions(used)),
        place[1:end],
        np.array(recorder.weights, dtype=np.int64),
        tuple(recorder.storages),
        np.array(recorder.done, dtype=np.int64),
        place[end:],
        tuple(recorder.names),
        *outputs,
    )


def _kept(fold: Fold | None, backward: Sequence[fx.Node], numbered: Numbered) -> dict[int, Kept]:
    """Returns, by run of blocks, the gathered values that some copies keep for backward."""
    found: dict[int, Kept] = {}
    if fold is None or not any(fold.kept.values()):
        return found
    calls = set(backward)
    gathers = {fold.copy(n.name): n for n in backward if op_name(n) == GATHER}
    for (run, copy), own in gathers.items():
        times = fold.kept.get(own.name, 0)
        if copy != 1 or not times:
            continue
        values = numbered.facts.of(own)
        read = tuple(
            sorted(
                int(item.args[1])  # type: ignore[arg-type]
                for item in own.users
                if item in calls and _is_read(item, calls, numbered.facts)
            )
        )
        sizes = tuple(numbered.size(values[i].storage_bytes) for i in read)
        found[run] = Kept(times, sizes, read, own, gathers[run, 0])
    return found


def _is_read(node: fx.Node, calls: set[fx.Node], facts: Facts) -> bool:
    """Whether a call reads a value or a view of it."""
    own = [user for user in node.users if user in calls]
    return any(facts.fresh(user) or _is_read(user, calls, facts) for user in own)


def _distinct(
    nodes: Sequence[fx.Node], storages: Lifetimes, without: set[int], fold: Fold | None
) -> dict[sympy.Expr, int]:
    """Returns size -> count of the nodes' distinct storages, those of other copies included."""
    found: dict[sympy.Expr, int] = {}
    seen = set(without)
    for node, storage, size in storages.of(nodes):
        if storage not in seen:
            seen.add(storage)
            found[size] = found.get(size, 0) + (1 if fold is None else fold.count(node.name))
    return found
