"""The recompute menu: cuts and plans equal to brute force, blocks, peaks, gradients."""

import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dcpc
from dcpc.api import plan
from dcpc.buckets import Bucket
from dcpc.ir import OUTSIDE
from dcpc.passes.recompute.block_cuts import Problem, between, hull
from dcpc.passes.recompute.menu import (
    AlikeBlocks,
    BlockChoices,
    ForwardCall,
    ValueMemory,
    cheapest,
    peak_bytes,
    recompute_menu,
)
from models.gpt import GPT, GPTConfig


def call(name, reads=(), seconds=1.0, size=1.0, *, savable=True, needed=False, kind=None):
    return ForwardCall(name, tuple(reads), kind or name, seconds, size, savable, needed)


def price(calls, again):
    """(bytes, seconds) of a set of values that are not saved, None where it cannot be."""
    by_name = {c.name: c for c in calls}
    there, made = set(), set()
    stack = [c.name for c in calls if c.needed]
    while stack:
        name = stack.pop()
        if name in there:
            continue
        there.add(name)
        if name in again:
            made.add(name)
            stack += by_name[name].reads
        elif not by_name[name].savable:
            return None
    size = sum(by_name[n].size_bytes for n in there - made)
    return size, sum(by_name[n].seconds for n in made)


@st.composite
def programs(draw):
    seed = draw(st.integers(0, 10**6))
    rng = random.Random(seed)
    n = rng.randint(2, 9)
    calls = []
    for i in range(n):
        reads = rng.sample([c.name for c in calls], min(len(calls), rng.randint(0, 2)))
        view = rng.random() < 0.2
        calls.append(
            call(
                f"v{i}", reads, 0.0 if view else rng.randint(1, 9), rng.randint(1, 9),
                savable=not view, needed=rng.random() < 0.6,
            )
        )  # fmt: skip
    return calls


@settings(max_examples=150, deadline=None)
@given(programs())
def test_corners_are_the_hull_of_all_choices_and_those_between_are_real(calls):
    problem = Problem.of(calls, set())
    names = [c.name for c in calls]
    every = (
        frozenset(chosen)
        for k in range(len(names) + 1)
        for chosen in itertools.combinations(names, k)
    )
    possible = [p for p in (price(calls, chosen) for chosen in every) if p is not None]
    corners = hull(problem)
    found = [(c.size_bytes, c.seconds) for c in corners]
    assert found[0] == min(possible, key=lambda p: (p[1], p[0]))
    assert found[-1][0] == min(size for size, _ in possible)
    for size, seconds in found:  # nothing is better in both
        assert not any(a < size and b < seconds - 1e-9 for a, b in possible)
    for (low, less), (high, more) in itertools.pairwise(found):
        slope = (more - less) / (low - high)
        best = min(b + slope * a for a, b in possible)
        assert more + slope * high <= best * (1 + 1e-5)
    for choice in between(problem, corners):
        again = {names[i] for i in choice.again}
        assert price(calls, again) == (choice.size_bytes, choice.seconds)


@st.composite
def chains(draw):
    rng = random.Random(draw(st.integers(0, 10**6)))

    def block():
        n = rng.randint(1, 4)
        saved = np.array([rng.randint(0, 9) for _ in range(n)], dtype=float)
        alive = saved + [rng.randint(0, 9) for _ in range(n)]
        seconds = np.array([rng.randint(0, 9) for _ in range(n)], dtype=float)
        return BlockChoices((frozenset(),) * n, saved, seconds, alive, 0.0, 0.0, ((0, 0.0),))

    return tuple(block() for _ in range(rng.randint(1, 5)))


@settings(max_examples=150, deadline=None)
@given(chains(), st.integers(0, 60))
def test_plans_are_the_cheapest_of_all_that_fit(blocks, peak):
    every = itertools.product(*(range(len(b.again)) for b in blocks))
    costs = [
        sum(b.seconds[c] for b, c in zip(blocks, plan, strict=True))
        for plan in every
        if peak_bytes(blocks, plan) <= peak
    ]
    found = cheapest(blocks, peak)
    if not costs:
        assert found is None
        return
    assert peak_bytes(blocks, found) <= peak
    assert sum(b.seconds[c] for b, c in zip(blocks, found, strict=True)) == min(costs)


def layer(i, before):
    """A block: a norm that is cheap and large, two matmuls, and a sum that flows on."""
    names = [f"{kind}{i}" for kind in ("norm", "up", "act", "down", "sum")]
    norm, up, act, down, total = names
    return [
        call(norm, [before] if before else [], 1, 8, needed=True, kind="norm"),
        call(up, [norm], 100, 32, needed=True, kind="up"),
        call(act, [up], 2, 32, needed=True, kind="act"),
        call(down, [act], 100, 8, kind="down"),
        call(total, [down, *([before] if before else [])], 1, 8, needed=True, kind="sum"),
    ]


def network(depth):
    calls = [call("embed", (), 5, 8, needed=True)]
    for i in range(depth):
        calls += layer(i, calls[-1].name)
    return [*calls, call("head", [calls[-1].name], 50, 4, needed=True)]


def memory_of(calls):
    """Backward reads what is needed, the last first, and hands a gradient of 8 bytes on."""
    backward, before = [], ()
    for c in reversed(calls):
        backward.append((f"grad_{c.name}", (*before, *([c.name] if c.needed else []))))
        before = (backward[-1][0],)
    names = [c.name for c in calls] + [name for name, _ in backward]
    sizes = {c.name: c.size_bytes for c in calls}
    return ValueMemory(
        storages={name: (i,) for i, name in enumerate(names)},
        size_bytes={i: sizes.get(name, 8.0) for i, name in enumerate(names)},
        transient_bytes={},
        backward=tuple(backward),
        gradients=frozenset(),
    )


def menu_of(calls):
    return recompute_menu(calls, memory_of(calls))


def simulated_peak(calls, again):
    """The most alive in backward if values are made again right before their first use."""
    memory, by_name = memory_of(calls), {c.name: c for c in calls}
    order, there, saved = [], set(), set()

    def need(name):
        if name in there or name not in by_name:
            return
        there.add(name)
        if name not in again:
            saved.add(name)
            return
        for source in by_name[name].reads:
            need(source)
        order.append((name, by_name[name].reads))

    for name, reads in memory.backward:
        for read in reads:
            need(read)
        order.append((name, reads))
    last = {n: i for i, (name, reads) in enumerate(order) for n in (name, *reads)}
    size = {n: memory.size_bytes[s[0]] for n, s in memory.storages.items()}
    live = most = sum(size[n] for n in saved)
    for i, (name, reads) in enumerate(order):
        live += size[name]
        most = max(most, live)
        live -= sum(size[n] for n in {name, *reads} if last[n] == i)
    return most


def test_plans_have_the_peaks_the_menu_says_and_cost_more_the_smaller_these_are():
    calls = network(6)
    menu = menu_of(calls)
    plans = range(menu.count)
    for k in plans:
        assert menu.peak_bytes(k) >= simulated_peak(calls, menu.made_again(k))
    assert menu.peak_bytes(0) == simulated_peak(calls, menu.made_again(0))
    seconds = [menu.seconds(k) for k in plans]
    assert seconds == sorted(seconds)
    assert menu.peak_bytes(menu.count - 1) < menu.peak_bytes(0) / 2


def test_blocks_that_choose_alike_make_the_same_values_again():
    menu = menu_of(network(6)).by_ratio()
    first = menu.made_again(menu.at_price(menu.prices[0]))
    assert {n.rstrip("0123456789") for n in first - menu.made_again(0)} == {"act"}
    for k in range(menu.count + 1):
        middle = [{n[:-1] for n in menu.made_again(k) if n.endswith(str(i))} for i in (1, 2, 3, 4)]
        assert middle[0] == middle[1] == middle[2] == middle[3]
    whole = menu_of(network(6))
    assert whole.made_again(whole.at_price(menu.prices[0])) == first


def test_what_flows_from_block_to_block_is_always_saved():
    menu = menu_of(network(5))
    everything = menu.made_again(menu.count)
    assert not any(n.startswith("sum") for n in everything - {"sum4"})


def test_nothing_to_gain_is_one_plan():
    assert menu_of([call("a", needed=True)]).made_again(0) == frozenset()
    assert recompute_menu([], memory_of([])).count == 0


@pytest.mark.parametrize("depth", [2, 40])
def test_the_same_menu_every_time(depth):
    one, other = menu_of(network(depth)), menu_of(network(depth))
    for k in range(0, one.count, 50):
        assert one.made_again(k) == other.made_again(k)


def test_gradients_are_bit_equal_and_the_peak_is_the_profiles_in_every_plan():
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=64, dim=32, n_layers=3, n_heads=4)).double()
    inputs = {"input_ids": "int64[batch, seq]", "labels": "int64[batch, seq]"}
    sizes = {"batch": 2, "seq": 48}
    planned = plan(
        model, dcpc.Buckets(inputs, [sizes]), memory=1e15, recompute="none", backend="eager"
    )
    runnable = planned.by_bucket[Bucket.of(sizes)]
    placement = runnable.priced.placement(sizes, 1)
    study = runnable.priced.at(placement)
    menu = study.menu
    given = {name: torch.randint(64, (2, 48)) for name in inputs}
    held = {**runnable.traced.tensors()}
    held |= {p: given[n] for p, n in runnable.traced.program.inputs.items()}
    want = torch.autograd.grad(model(**given), [*model.parameters()])
    first, peaks = None, []
    for k in [*range(0, menu.count, 32), menu.count - 1, menu.count]:
        variant, integers = runnable.variant(placement, k, sizes, 0)
        loss = variant([held[p] for p in variant.placeholders], integers)
        found = torch.autograd.grad(loss, [*model.parameters()])
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True))
        for a, b in zip(found, want, strict=True):
            assert torch.allclose(a, b, rtol=1e-10, atol=1e-14)
        peaks.append(study.predict(k, sizes).peak_bytes)
        if k < menu.count:
            assert menu.peak_bytes(k) == pytest.approx(peaks[-1], rel=0.05)
    assert peaks[-2] < peaks[0] / 2
    assert peaks[:-1] == sorted(peaks[:-1], reverse=True)


def test_blocks_that_choose_alike_have_choices_between_those_of_the_hull():
    """A GPT's blocks have five prices: a budget between two of them must not pay for the next."""
    calls = network(8)
    copies = [int(c.name[-1]) if c.name[-1].isdigit() else 0 for c in calls]
    blocks = AlikeBlocks(calls, copies)
    menu = blocks.menu
    assert blocks.least == menu.made_again(0)
    prices = len(menu.prices)
    assert prices < menu.count
    for k in range(menu.count):
        assert menu.saved_bytes(k + 1) < menu.saved_bytes(k)
        assert menu.seconds(k + 1) > menu.seconds(k)
    last = menu.at_price(menu.prices[-1])
    assert last == menu.count
    assert menu.at_price(0.0) == 0


@pytest.mark.parametrize("before", [0, 1, 2])
def test_what_runs_once_more_before_the_copies_is_a_block_of_its_own(before):
    """Two blocks made again at once take twice the memory; what flows between them is saved."""
    calls = network(before + 3)

    def copy(name):
        layer = int(name[-1]) if name[-1].isdigit() else -1
        return OUTSIDE if layer < before else (0, layer - before)

    menu = AlikeBlocks(calls, [copy(c.name) for c in calls]).menu
    assert [b.forward_s for b in menu.blocks] == [209, *[204] * (before + 2), 50]
    everything = menu.made_again(menu.count)
    assert not any(n.startswith("sum") for n in everything - {f"sum{before + 2}"})
    assert {f"up{i}" for i in range(before + 3)} <= everything


def test_what_another_block_reads_a_view_of_is_saved():
    """Else the next block's backward makes it again, and all that is before it."""
    calls: list[ForwardCall] = []
    for i in range(6):
        reads = [f"view{i - 1}"] if i else []
        calls += [
            call(f"up{i}", reads, seconds=50, size=4, needed=True, kind="up"),
            call(f"act{i}", [f"up{i}"], seconds=3, size=4, needed=True, kind="act"),
            call(f"down{i}", [f"act{i}"], seconds=50, size=1, kind="down"),
            call(f"view{i}", [f"down{i}"], seconds=0, savable=False, needed=True, kind="view"),
        ]
    blocks = AlikeBlocks(calls, [(0, i // 4) for i in range(len(calls))])
    menu = blocks.menu
    assert blocks.least == menu.made_again(0) != frozenset()
    everything = menu.made_again(menu.count)
    assert {f"up{i}" for i in range(6)} <= everything
    assert not any(f"down{i}" in everything for i in range(5))
