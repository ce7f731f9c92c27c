"""Models that one process plans for all ranks, which are forks of it and find the plan made.

    def prepare(sp: int) -> Ready:
        return Ready(model(), buckets, world=2, backend="eager", sp=sp)

    def on_rank(rank: int, ready: Ready) -> float:
        compiled = ready.compile()

    run_prepared(prepare, on_rank, 2, 2)

Traces, plans, stages and the graphs of the plans are most of a compile, and alike on all ranks.
All that comes after them each rank does itself: it agrees, verifies, builds and runs. That ranks
which trace and plan alone find the same is held by `tests/test_tiny.py`,
`tests/multirank/test_exactness.py` (through compile) and the quick tests of `tests/multirank/`.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import nn

import dcpc
from dcpc.api import compiling, plan_model
from dcpc.api.search import Traces
from dcpc.buckets import BATCH
from dcpc.plan.options import CompileOptions, PlanOptions
from dcpc.plan.planning import Planned


@contextmanager
def traced_once() -> Iterator[None]:
    """Has `dcpc.api.plan` trace a module once in its block, whatever ways to hold it are planned.

    Options that say what is traced (device, backend, attention, autocast) have traces of their own.
    """
    kept: list[tuple[tuple[Any, ...], Traces]] = []

    def made(model: nn.Module, buckets: dcpc.Buckets, options: PlanOptions, *more: Any) -> Traces:
        told = options.device, options.backend, options.autocast, options.attention, options.loss
        asked = model, buckets, told, options.world > 1 and options.derive_rules, more
        found = [traces for given, traces in kept if given == asked]
        if not found:
            found = [Traces(model, buckets, options, *more)]
            kept.append((asked, *found))
        return found[0]

    with mock.patch.object(plan_model, "Traces", made):
        yield


class Keeper:
    """Plans and stages that were made once: whoever asks for the same again gets them."""

    def __init__(self) -> None:
        self._kept: list[tuple[tuple[Any, ...], Any]] = []

    def around(self, module: Any, makes: bool = True) -> ExitStack:
        """Returns a context in which a module gets what is kept.

        Args:
            module: module of `dcpc.api` that plans.
            makes: whether what is not kept yet is made and kept; else it is an error.
        """
        stack = ExitStack()
        for name in ("plan_with", "cut_model"):
            kept = self._kept_of(name, getattr(module, name), makes)
            stack.enter_context(mock.patch.object(module, name, kept))
        return stack

    def _kept_of(self, name: str, real: Callable[..., Any], makes: bool) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            asked = (name, args, more)
            found = [result for given, result in self._kept if given == asked]
            assert found or makes, f"{name}: a rank asks for what was not made ready"
            if not found:
                found = [real(*args, **more)]
                self._kept.append((asked, *found))
            return found[0]

        return call


class Ready:
    """A model with what `dcpc.compile` of some ranks plans for it.

    Args:
        model: the module.
        buckets: as for `dcpc.compile`.
        world: number of ranks that will compile it.
        options: those of `dcpc.compile`, for all of them.
    """

    def __init__(self, model: nn.Module, buckets: dcpc.Buckets, world: int, **options: Any) -> None:
        self.model, self.buckets, self.options = model, buckets, options
        self._keeper = Keeper()
        given = CompileOptions(**options)
        told = given.planned_for(world)
        with self._keeper.around(plan_model):
            if given.pipeline is None:
                self._graphs(plan_model.plan_with(model, buckets, told), given)
            else:
                assert isinstance(given.pipeline, int), "auto prices both kinds"
                plan_model.cut_with(model, buckets, told, given.pipeline)

    def compile(self) -> dcpc.CompiledModel:
        """Returns what `dcpc.compile` makes on this rank, which does not plan anew."""
        with self._keeper.around(compiling, makes=False):
            return dcpc.compile(self.model, self.buckets, **self.options)

    def _graphs(self, planned: Planned, given: CompileOptions) -> None:
        """Makes the graphs of the plans; has Inductor compile them where they run as they are.

        They do not where they are verified first, or where a round says which units are gathered
        again.
        """
        compiles = given.verify == "off" and given.backend == "inductor"
        compiles = compiles and given.parameters != "rounds"
        for bucket, plan in planned.plans.items():
            runnable, placement = planned.by_bucket[bucket], planned.placement(bucket)
            sizes = {BATCH: plan.micro_batch, **bucket.sizes}
            if compiles:
                for rank in range(plan.sp):
                    runnable.variant(placement, plan.menu_step, sizes, rank)
            else:
                runnable.partition(placement, plan.menu_step)
