from itertools import product

import pytest

from dcpc.ops.pieces import piece, runs


@pytest.mark.parametrize("zigzag", [False, True])
def test_runs_share_out_every_element_once_and_evenly(zigzag):
    for p, n in product((1, 2, 3, 4, 5, 8), range(60)):
        lengths, seen = [], []
        for rank in range(p):
            mine = runs(n, n, 0, p, rank, zigzag)
            lengths.append(sum(length for _, length in mine))
            seen += [i for start, length in mine for i in range(start, start + length)]
        assert sorted(seen) == list(range(n))
        assert lengths == [piece(n, n, 0, p, rank)[1] for rank in range(p)]


def test_a_slice_has_its_parents_runs_cut():
    """`x[:, 2:]`: each rank has what it has of x, less the first two."""
    for p, n in product((2, 3, 4), range(2, 30)):
        for rank in range(p):
            whole = [i for s, k in runs(n, n, 0, p, rank, True) for i in range(s, s + k)]
            cut = [i for s, k in runs(n - 2, n, 2, p, rank, True) for i in range(s, s + k)]
            assert cut == [i - 2 for i in whole if i >= 2]


def test_zigzag_shares_out_causal_pairs():
    """At a multiple of 2p each rank has as many pairs of query and key."""
    n, p = 48, 4
    pairs = [
        sum(i + 1 for s, k in runs(n, n, 0, p, r, True) for i in range(s, s + k)) for r in range(p)
    ]
    assert set(pairs) == {n * (n + 1) // 2 // p}
