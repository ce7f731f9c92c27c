"""The recompute menu: cuts equal to brute force, blocks, steps."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpc.passes.recompute import Call, recompute_menu


def call(name, reads=(), seconds=1.0, size=1.0, *, savable=True, needed=False, kind=None):
    return Call(name, tuple(reads), kind or name, seconds, size, savable, needed)


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
def test_menus_are_on_the_hull_of_all_choices(calls):
    menu = recompute_menu(calls)
    names = [c.name for c in calls]
    every = (
        frozenset(chosen)
        for k in range(len(names) + 1)
        for chosen in itertools.combinations(names, k)
    )
    possible = [p for p in (price(calls, chosen) for chosen in every) if p is not None]
    found = [price(calls, menu.made_again(k)) for k in range(len(menu.steps) + 1)]
    assert all(p is not None for p in found)
    assert found[0] == min(possible, key=lambda p: (p[1], p[0]))
    assert found[-1][0] == min(size for size, _ in possible)
    for size, seconds in found:  # nothing is better in both
        assert not any(a < size and b < seconds - 1e-9 for a, b in possible)
    for (size, seconds), step in zip(found[1:], menu.steps, strict=True):
        slope = step.seconds / step.freed_bytes
        best = min(b + slope * a for a, b in possible)
        assert seconds + slope * size <= best * (1 + 1e-5)


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


def test_repeated_blocks_have_the_same_steps_and_the_cheapest_come_first():
    menu = recompute_menu(network(6))
    first = menu.steps[:6]
    assert [s.freed_bytes for s in first] == [32.0] * 6  # the activation, for two seconds
    assert [s.seconds for s in first] == [2.0] * 6
    blocks = [s.block for s in first]
    assert blocks == sorted(blocks)
    assert {n.rstrip("0123456789") for s in first for n in s.again} == {"act"}
    ratios = [s.freed_bytes / s.seconds for s in menu.steps]
    assert ratios == sorted(ratios, reverse=True)
    assert menu.made_again(0) <= menu.made_again(6)


def test_what_flows_from_block_to_block_is_always_saved():
    menu = recompute_menu(network(5))
    everything = menu.made_again(len(menu.steps))
    assert not any(n.startswith("sum") for n in everything - {"sum4"})


def test_nothing_to_gain_is_no_step():
    menu = recompute_menu([call("a", needed=True), call("b", ["a"], needed=True, seconds=0.0)])
    assert [s.again for s in menu.steps] == [frozenset({"a"})]
    assert recompute_menu([]).steps == ()


@pytest.mark.parametrize("depth", [2, 40])
def test_the_same_menu_every_time(depth):
    assert recompute_menu(network(depth)) == recompute_menu(network(depth))
