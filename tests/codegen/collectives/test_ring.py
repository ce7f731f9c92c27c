"""Where keys go round a ring, and what is sent: in numbers alone, without ranks."""

from itertools import product

import pytest

from dcpc.ops.ring_route import RowSplit, route, sent_bytes


def in_order(n: int) -> RowSplit:
    return RowSplit(n, n, 0, False)


def zigzag(n: int) -> RowSplit:
    return RowSplit(n, n, 0, True)


def seen(q: int, k: int, before: int | None, after: int | None) -> bool:
    return (before is None or k >= q - before) and (after is None or k <= q + after)


def rows(runs) -> list[int]:
    return [i for run in runs for i in range(run.position, run.position + run.length)]


@pytest.mark.parametrize("band", [(None, None), (None, 0), (4, 0), (2, 3), (0, 5)])
@pytest.mark.parametrize("make", [in_order, zigzag])
def test_keys_come_to_all_who_see_them_and_go_no_further(make, band):
    for p, across, n in product((2, 4, 6), (1, 2), (1, 3, 7, 24, 37)):
        way = route(make(n), make(n), p, across, *band)
        m = way.positions
        for owner, (forth, back) in enumerate(zip(way.forth, way.back, strict=True)):
            needed = {
                hop
                for hop in range(1, m)
                for q in rows(way.queries[(owner + hop) % m])
                for k in rows(way.keys[owner])
                if seen(q, k, *band)
            }
            assert needed <= {*range(1, forth + 1), *range(m - back, m)}
            assert {forth, m - back} <= needed | {0, m}, "the last to get them see some"
            assert forth + back <= max(needed, default=0)


def test_rows_of_a_position_are_its_ranks_together():
    way = route(zigzag(16), in_order(16), 4, 2)
    assert [rows(mine) for mine in way.queries] == [
        [0, 1, 2, 3, 12, 13, 14, 15],
        [4, 5, 6, 7, 8, 9, 10, 11],
    ]
    assert [len(mine) for mine in way.queries] == [2, 1]  # what touches is one run
    assert [rows(mine) for mine in way.keys] == [list(range(8)), list(range(8, 16))]


@pytest.mark.parametrize(("p", "across"), [(2, 1), (4, 1), (4, 2), (8, 2)])
def test_bytes_of_even_pieces_are_the_formula(p, across):
    n, row, gradient_row, m = 80, 12, 24, p // across
    for split in (zigzag(n), in_order(n)):
        way = route(split, split, p, across)
        for rank in range(p):
            forward, backward = sent_bytes(way, rank, row, gradient_row)
            assert forward == (m - 1) * n // m * row
            assert backward == forward + m * (n // m) * gradient_row


def test_a_window_sends_to_the_next_alone():
    way = route(in_order(80), in_order(80), 8, before=10, after=0)
    assert way.forth == (1, 1, 1, 1, 1, 1, 1, 0)
    assert way.back == (0,) * 8
    sent = [sent_bytes(way, rank, 1, 1) for rank in range(8)]
    assert sent[0] == (10, 20)  # its keys; and again with their gradients
    assert sent[3] == (10, 30)  # those of the one before it go home as well
    assert sent[7] == (0, 10)  # home alone


def test_causal_keys_do_not_go_back_to_those_before_them():
    way = route(in_order(40), in_order(40), 4, after=0)
    assert (way.forth, way.back) == ((3, 2, 1, 0), (0,) * 4)
    total = sum(sent_bytes(way, rank, 1, 0)[0] for rank in range(4))
    assert total == 10 * (3 + 2 + 1)


def test_all_keys_pass_all_where_a_mean_is_asked_for():
    way = route(in_order(40), in_order(40), 4, after=0, everywhere=True)
    assert (way.forth, way.back) == ((3,) * 4, (0,) * 4)


def test_a_window_both_ways_sends_both_ways():
    way = route(in_order(80), in_order(80), 8, before=10, after=5)
    assert way.forth == (*[1] * 7, 0)
    assert way.back == (0, *[1] * 7)
    # Keys to both, and again; gradients forward with its own part, and home to both.
    assert sent_bytes(way, 3, 1, 1) == (20, 20 + 30)
