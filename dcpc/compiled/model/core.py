"""The state that all parts of a compiled model share: model, plans, store and graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from torch import nn

from dcpc.buckets import Bucket, Buckets
from dcpc.compiled.agreed_state import AgreedState
from dcpc.compiled.dispatch import Dispatch
from dcpc.compiled.editions import Edition, EditionCache, Prepare
from dcpc.compiled.materialize import memory_of, on_meta
from dcpc.compiled.memory.tighter import TighterPlans
from dcpc.compiled.seeds import Seeds
from dcpc.errors import DispatchError
from dcpc.ir import BucketPlan
from dcpc.plan.choose import TriedRow
from dcpc.plan.planning import Planned
from dcpc.plan.runnable import Runnable
from dcpc.runtime.averages import RunningAverages
from dcpc.runtime.groups.agreement import agree
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.parameters.away_state import AwayState
from dcpc.runtime.parameters.modes import shared_out, store_of
from dcpc.runtime.parameters.reduction import COMM_BUCKET_BYTES
from dcpc.runtime.parameters.store import ParameterStore, WholeStore
from dcpc.runtime.planner.speeds import LearnedSpeeds
from dcpc.trace.loss import returns_statistics
from dcpc.trace.statistics import running_names
from dcpc.verify import Verifier


class ModelCore:
    """The results of `dcpc.compile`, and the state that changes while the model is used.

    Args:
        base_seed: seed that all random numbers of train steps follow from.
        verifier: verifier that compares the graphs with the model.
        prepare: function that makes runnables of programs, as `dcpc.compile` did.
        unpad: mode of calls without padding, as for `Unpadding`.

    Attributes:
        plans: setting of each bucket. One object: reports read what is planned again, too.
        tables: settings of each bucket that plans choose from.
        unmade: whether the model is on the meta device, until `dcpc.materialize`.
        store: store of the parameters; empty while the model is unmade.
        state: keeper of the optimizer's state beyond the device; None: it is on it.
        averages: running statistics of batch norms that train.
        comm_bucket_bytes: bytes of gradients that are sent at once.
        calls: number of calls by hand, by which ranks that meet know which one they are in.
    """

    def __init__(
        self,
        model: nn.Module,
        buckets: Buckets,
        planned: Planned,
        groups: Groups,
        base_seed: int,
        verifier: Verifier,
        prepare: Prepare,
        learned: LearnedSpeeds,
        unpad: bool | str = False,
    ) -> None:
        self.model, self.buckets, self.planned, self.groups = model, buckets, planned, groups
        self.verifier, self.learned = verifier, learned
        self.plans = cast(dict[Bucket, BucketPlan], planned.plans)
        tables = dict(planned.tables)
        self.tables: Mapping[Bucket, tuple[TriedRow, ...]] = tables
        self.comm_bucket_bytes, self.calls = COMM_BUCKET_BYTES, 0
        groups.number("users")
        self._closed = False
        self.unmade = on_meta(model) and not shared_out(model)
        self.store: ParameterStore = WholeStore((), groups)
        if not self.unmade:
            asked = planned.request
            self.hold(
                store_of(
                    asked.parameters, model.parameters(), groups, asked.block,
                    memory_of(asked.held_away),
                )
            )  # fmt: skip
            self.store.install(model)
        self.seeds = Seeds(base_seed, groups)
        self.tighter = TighterPlans(
            planned, self.plans, tables, cast(dict[Bucket, Runnable], planned.by_bucket), groups
        )
        names = running_names(model) if returns_statistics(planned.loss) else ()
        self.averages = averages = RunningAverages(model, names, groups)
        self.dispatch = Dispatch(buckets, planned, groups, self.seeds, self.store, averages, unpad)

        def make(mine: Buckets, found: Planned) -> Dispatch:
            dispatch = Dispatch(mine, found, groups, self.seeds, self.store, averages, unpad)
            dispatch.stats = self.dispatch.stats
            return dispatch

        first = Edition.of(model, buckets, planned, verifier, self.dispatch)
        self.editions = EditionCache(model, first, prepare, make, groups.device.type)
        self.agreed = AgreedState(model, planned, groups)

    def hold(self, store: ParameterStore) -> None:
        """Takes the store of parameters, and keeps their optimizers' state where it is planned."""
        self.store, memory = store, memory_of(self.planned.request.state_away)
        self.state = None if memory is None else AwayState(store, memory)

    def refuse_unmade(self, what: str) -> None:
        """Refuses a use of parameters, by its name, before they have memory."""
        if self.unmade:
            raise DispatchError(
                f"got {what} of a model on the meta device, whose parameters have no memory and no "
                "values; expected one that was materialized; call dcpc.materialize(compiled) on "
                "every rank first, and make the optimizer after it"
            )

    def close(self) -> None:
        """Gives back the process groups, with their threads and connections; collective.

        All compiled models of the same ranks share them: they are closed with the last that is
        open. One that was closed runs no more; parameters stay.

        Raises:
            GroupError: a rank does not close it, or closes another one.
        """
        if self._closed:
            return
        agree(self.groups, self.groups.world, "close", "")
        self._closed = True
        self.groups.leave()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Closes it; not after an error, of which other ranks may not know."""
        if kind is None:
            self.close()
