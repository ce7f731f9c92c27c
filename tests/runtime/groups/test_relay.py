"""Plans from rank 0 to the others through a store: all arrive, none stays, errors by name."""

import threading

import pytest
import torch.distributed as dist

from dcpc.errors import DataError, DcpcError, PlanError
from dcpc.runtime.data.loader import DataLoader
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.groups.relay import ClosedError, Relay
from tests.cases.fakes import RaggedWithDims, compiled_for

WORLD = 3
PAD = {"input_ids": 0, "labels": -100}


class OnlyStore:
    """A process group of which its store is used; a rank that reduces agrees with itself."""

    def __init__(self, store):
        self.store = store

    def get_group_store(self):
        return self.store

    def allreduce(self, tensors, options):
        return self

    def wait(self, limit):
        return True


def groups_over(store) -> list[Groups]:
    control = {WORLD: OnlyStore(store)}
    return [
        Groups(WORLD, r, timeout_s=20, global_ranks=(4, 5, 6), _control=control)
        for r in range(WORLD)
    ]


def relays(store, timeout_s=20.0) -> list[Relay]:
    return [Relay(g, "1/1", timeout_s) for g in groups_over(store)]


def in_threads(*functions):
    """Results, or errors, of functions that run side by side."""
    results = [None] * len(functions)

    def run(i, function):
        try:
            results[i] = function()
        except Exception as e:
            results[i] = e

    threads = [threading.Thread(target=run, args=x) for x in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_every_rank_gets_every_message_and_the_store_is_empty_after():
    store = dist.HashStore()
    send, *receive = relays(store)
    messages = [({"index": i}, i) for i in range(20)]
    sent, *got = in_threads(
        lambda: list(send.send(iter(messages))), *(lambda r=r: list(r.receive()) for r in receive)
    )
    assert sent == list(range(20))
    assert got == [[{"index": i} for i in range(20)]] * 2
    for r in (send, *receive):
        r.close(21)
    assert store.num_keys() == 0


def test_keys_of_messages_that_are_not_used_are_deleted_at_the_end():
    store = dist.HashStore()
    send, *receive = relays(store)
    list(send.send(({"index": i}, i) for i in range(5)))
    first = [next(r.receive()) for r in receive]
    assert first == [{"index": 0}] * 2
    send.close(used=1)
    assert store.num_keys() == 0


class BrokenError(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (BrokenError("no more plans"), PlanError,
         "planner of rank 4: got BrokenError: no more plans"),
        (DataError("sample 3 is too long"), DataError, "planner of rank 4: sample 3 is too long"),
        (SystemExit("killed"), PlanError, "planner of rank 4: got SystemExit: killed"),
    ],
)  # fmt: skip
def test_error_of_the_planner_reaches_every_rank(error, kind, message):
    def planning():
        yield {"index": 0}, 0
        raise error

    send, *receive = relays(dist.HashStore())
    with pytest.raises(type(error)):
        list(send.send(planning()))
    for r in receive:
        messages = r.receive()
        assert next(messages) == {"index": 0}
        with pytest.raises(kind, match=message):
            next(messages)


def test_silent_planner_is_named_within_the_limit():
    _, first, second = relays(dist.HashStore(), timeout_s=0.5)
    found = in_threads(lambda: next(first.receive()), lambda: next(second.receive()))
    for error in found:
        assert isinstance(error, PlanError)
        assert "plan 0 of this iteration: got nothing within 0.5 s from rank 4" in str(error)


@pytest.mark.parametrize("at", [3, 30, -1])
def test_a_message_that_was_damaged_on_its_way_is_named(at):
    store = dist.HashStore()
    send, first, _ = relays(store)
    list(send.send(iter([({"index": 3, "plan": [1, 2]}, 0)])))
    there = dist.PrefixStore("dcpc/plans/1/1", store)
    damaged = bytearray(there.get("0"))
    damaged[at] ^= 2
    there.set("0", bytes(damaged))
    with pytest.raises(PlanError, match="plan 0 of this iteration: got a message whose checksum"):
        next(first.receive())


def test_close_ends_a_wait():
    _, reader, _ = relays(dist.HashStore())
    threading.Timer(0.2, reader.close).start()
    with pytest.raises(ClosedError):
        next(reader.receive())


SETTINGS = {4: (1, 3), 7: (1, 2), 16: (3, 1)}
LENGTHS = [4, 2, 16, 7, 5, 1, 16, 12, 4, 4, 3, 7, 9] * 3


def loaders(store, **options):
    options = {"tokens_per_step": 20, "pad": PAD, "seed": 5, **options}
    return [
        DataLoader(RaggedWithDims(LENGTHS), compiled_for(g, SETTINGS), **options)
        for g in groups_over(store)
    ]


def plans(loader):
    return [step.plan for step in loader]


@pytest.mark.parametrize("lookahead", [0, 2])
def test_ranks_that_receive_get_the_plans_of_the_one_that_plans(lookahead):
    store = dist.HashStore()
    every = loaders(store, lookahead=lookahead)
    first, *others = in_threads(*(lambda x=x: plans(x) for x in every))
    assert len(first) > 5
    assert others == [first, first]
    assert store.num_keys() == 0
    states = [x.state_dict() for x in every]
    assert states == [states[0]] * 3
    # Another iteration of the same loaders: the next epoch.
    again, *others = in_threads(*(lambda x=x: plans(x) for x in every))
    assert others == [again, again]
    assert again != first


def test_loop_left_early_on_every_rank_leaves_nothing_behind():
    store = dist.HashStore()

    def two(loader):
        found = []
        for step in loader:
            found.append(step.plan)
            if len(found) == 2:
                break
        return found

    every = loaders(store, lookahead=0)
    first, *others = in_threads(*(lambda x=x: two(x) for x in every))
    assert others == [first, first]
    assert store.num_keys() == 0


def refusal(loader) -> DcpcError:
    """What a loader's step says is wrong with it: `train_step` raises it, and the loader after."""
    steps = iter(loader)
    step = next(steps)
    assert not step.plan.micro_batches
    with pytest.raises(type(step.problem)) as raised:
        next(steps)
    assert raised.value is step.problem
    return step.problem


def test_other_arguments_or_state_on_a_rank_are_named():
    first, second, _ = loaders(dist.HashStore(), lookahead=0)
    second.load_state_dict({**second.state_dict(), "seed": 6})
    _, error = in_threads(lambda: next(iter(first)), lambda: refusal(second))
    assert isinstance(error, DataError)
    assert "got a plan for epoch 0 from place 0, step 0, seed 5" in str(error)
    assert "expected epoch 0 from place 0, step 0, seed 6" in str(error)


def test_plan_of_another_table_is_refused():
    first, second, _ = loaders(dist.HashStore(), lookahead=0)
    second.compiled = compiled_for(second.compiled.groups, {**SETTINGS, 4: (1, 2)})
    _, error = in_threads(lambda: next(iter(first)), lambda: refusal(second))
    assert isinstance(error, PlanError)
    assert "got a plan made from plan table" in str(error)
