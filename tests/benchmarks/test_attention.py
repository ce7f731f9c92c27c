"""The attention benchmark's counts, and its comparison with the plain layer on a few cases."""

import math

import pytest
import torch

from benchmarks.attention import QUICK_WORLDS, jobs
from benchmarks.attention_times import ALONE, Crossover, Times, crossovers, error_of, shared
from dcpc.ops.pieces import runs
from dcpc.symbolic_profile import ClassFit, Fits
from tests.exact.attention import Job, Prepared, cases_of, drawn_lengths, saved_by_ranks
from tests.exact.attention_counts import (
    clear,
    crossing,
    imbalance,
    pairs,
    ring_bytes,
    swap_bytes,
    worst_imbalance,
)
from tests.exact.attention_layer import KINDS


@pytest.mark.parametrize("zigzag", [False, True])
def test_pairs_are_those_of_the_causal_mask(zigzag):
    for length, p in ((1, 2), (7, 3), (64, 4), (301, 5)):
        mask = torch.ones(length, length).tril().sum(1)
        found = pairs(length, p, zigzag)
        for rank, count in enumerate(found):
            mine = runs(length, length, 0, p, rank, zigzag)
            assert count == sum(int(mask[a : a + n].sum()) for a, n in mine)
        assert sum(found) == length * (length + 1) // 2


def test_zigzag_balances_what_order_does_not():
    assert imbalance(512, 4, zigzag=True) == 0
    assert imbalance(512, 4, zigzag=False) == pytest.approx(0.75, abs=0.01)
    assert 0 < worst_imbalance(8, zigzag=True) < 0.02 < worst_imbalance(8, zigzag=False)


def test_bytes_of_even_pieces_are_the_closed_formulas():
    n, p, row = 48, 4, 10
    for rank in range(p):
        whole = ring_bytes(n, p, rank, across=1, zigzag=True, row_bytes=row)
        assert whole == ((p - 1) * 2 + p) * n // p * row
        pairs_of_ranks = ring_bytes(n, p, rank, across=2, zigzag=True, row_bytes=row)
        assert pairs_of_ranks == (1 * 2 + 2) * n // 2 * row
        # Half of each rank's rows goes to the other of two, of q, k, v and out, there and back.
        assert swap_bytes(n, p, rank, across=2, zigzag=True, head_bytes=[3] * 4) == 8 * 3 * n // p


def test_crossing_is_interpolated_in_logarithms():
    lengths = (100, 1000, 10_000)
    linear, square = [float(n) for n in lengths], [n**2 / 3000 for n in lengths]
    assert crossing(lengths, linear, square) == pytest.approx(3000)
    assert crossing(lengths, square, linear) == pytest.approx(3000)
    assert crossing(lengths, linear, [2 * x for x in linear]) is None
    assert clear(linear, square, 0.1)
    assert not clear(linear, [1.05 * x for x in linear], 0.1)


def times(measured: dict[str, list[float]], predicted: dict[str, list[float]]) -> Times:
    lengths = (100, 1000, 10_000)

    def table(of):
        return {(way, n): s for way, each in of.items() for n, s in zip(lengths, each, strict=True)}

    return Times(2, table(measured), table(predicted), 3)


def test_crossovers_found_missed_and_invented():
    flat, rising, other = [1.0, 1.0, 1.0], [0.1, 1.0, 10.0], [0.2, 2.0, 20.0]
    (found,) = crossovers(times({ALONE: rising, "ring": flat}, {ALONE: other, "ring": flat}))
    assert found.measured == pytest.approx(1000)
    assert found.predicted == pytest.approx(500)
    assert error_of([found]) == pytest.approx(0.5)
    above = [2.0, 3.0, 40.0]
    (missed,) = crossovers(times({ALONE: rising, "ring": flat}, {ALONE: above, "ring": flat}))
    assert missed == Crossover(2, (ALONE, "ring"), missed.measured, None, False)
    (invented,) = crossovers(times({ALONE: above, "ring": flat}, {ALONE: rising, "ring": flat}))
    assert invented.measured is None
    assert invented.predicted_clear
    assert error_of([missed, invented]) is None
    assert "1000.0 (1000.0)" in str(times({"ring": flat}, {"ring": flat}).rows()[0])


def test_ranks_that_share_cores_take_longer():
    one = ClassFit("attention", True, torch.float32, 1e-5, knots=((1.0, 1e-9),))
    fits = Fits((one,), (), ((torch.float32, 1e9),), 1e9, 1e-5, 0.1)
    assert shared(fits, 2, cores=2).classes == (one,)
    halved = shared(fits, 4, cores=2).classes[0]
    assert halved.launch_s == 2e-5
    assert halved.knots == ((1.0, 2e-9),)


def test_quick_run_has_every_layer_of_the_comparison():
    quick = jobs(quick=True)
    assert {job.kind for job in quick} == set(QUICK_WORLDS)
    full = jobs(quick=False)
    assert {job.kind for job in full} == set(KINDS)
    assert {p for job in full for p in job.worlds} == {2, 3, 4, 5, 8}
    for p in (2, 3, 4, 5, 8):
        lengths = drawn_lengths(p, 24, 300)
        assert {1, 300, p - 1} <= set(lengths)
        assert any(n % p for n in lengths)
        assert any(n % (2 * p) == 0 for n in lengths)


@pytest.mark.multirank
def test_lowerings_are_the_plain_layer_and_send_what_the_formula_says():
    found = cases_of(Job("GQA 8:1, causal", (3,), ("heads", "ring"), ((1, 2, 7, 24),)))
    assert {(c.lowering, c.length) for c in found} == {
        (lowering, n) for lowering in ("heads", "ring") for n in (1, 2, 7, 24)
    }
    for case in found:
        assert case.error < 1e-10, case
        assert case.bytes_off == 0, case
        assert case.sent_bytes > 0, case
    assert [c.length for c in found if c.by_profile] == [24]  # 2 key heads are uneven on 3 ranks


def test_a_ring_of_twice_the_ranks_keeps_half():
    saved = saved_by_ranks((2, 4), 64)
    assert saved[2] == 2 * saved[4] > 0


def test_output_and_gradients_of_input_q_k_v_are_compared():
    prepared = Prepared(Job("1 head, causal", (1,), (), ((5,),)))
    loss, gradients = prepared.expected[5].loss, prepared.expected[5].gradients
    names = {"input", "output", "q_rows", "k_rows", "v_rows"}
    assert {f"{name}.weight" for name in names} <= set(gradients)
    assert all(g is not None and math.isfinite(float(g.sum())) for g in gradients.values())
    assert math.isfinite(float(loss))
