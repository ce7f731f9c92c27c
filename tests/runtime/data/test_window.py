"""Batches from a window: every sample once, near its place, resumable anywhere."""

from hypothesis import given, settings
from hypothesis import strategies as st

from dcpc.buckets import Bucket
from dcpc.runtime.data.samples import SampleBucket
from dcpc.runtime.data.window import Position, take

BUCKETS = [Bucket.of({"seq": n}) for n in (4, 8, 16)]


def fits(lengths):
    """Sample i has lengths[i]; longer than 16 fits nowhere."""

    def fit(i):
        n = lengths[i]
        bucket = next((b for b in BUCKETS if b["seq"] >= n), None)
        return SampleBucket((("seq", n),), bucket, n)

    return fit


def epoch(lengths, tokens, window, one_bucket=False, position=None):
    order = list(range(len(lengths)))[::-1]
    position = position or Position()
    while position.start < len(order):
        batch = take(order, fits(lengths), position, tokens, window, one_bucket)
        position = batch.after
        yield batch


problems = st.tuples(
    st.lists(st.integers(1, 18), min_size=1, max_size=60),
    st.integers(1, 60),
    st.integers(0, 20),
    st.booleans(),
)


@settings(deadline=None)
@given(problems)
def test_every_sample_once_and_less_than_the_window_from_its_place(problem):
    lengths, tokens, window, one_bucket = problem
    batches = list(epoch(lengths, tokens, window, one_bucket))
    trained = [i for batch in batches for i, _ in batch.samples]
    skipped = [i for batch in batches for i in batch.skipped]
    assert sorted(trained + skipped) == list(range(len(lengths)))
    assert all(lengths[i] > 16 for i in skipped)
    order = [i for i in reversed(range(len(lengths))) if lengths[i] <= 16]
    place = {i: p for p, i in enumerate(order)}
    for q, i in enumerate(trained):
        assert abs(place[i] - q) < max(1, window)


@settings(deadline=None)
@given(problems)
def test_batches_are_within_their_tokens_and_of_one_bucket_where_asked(problem):
    lengths, tokens, window, one_bucket = problem
    for batch in epoch(lengths, tokens, window, one_bucket):
        own = [lengths[i] for i, _ in batch.samples]
        assert batch.tokens == sum(own)
        assert batch.tokens <= tokens or len(own) == 1
        assert not one_bucket or len({b for _, b in batch.samples}) <= 1
        assert batch.samples or batch.skipped


@settings(deadline=None)
@given(problems, st.integers(0, 20), st.integers(1, 60))
def test_resumed_with_other_settings_nothing_is_lost_or_repeated(problem, stop, other_tokens):
    lengths, tokens, window, one_bucket = problem
    batches = list(epoch(lengths, tokens, window, one_bucket))[: stop + 1]
    rest = epoch(lengths, other_tokens, 3, position=batches[-1].after)
    seen = [i for batch in (*batches, *rest) for i in (*(s for s, _ in batch.samples),
                                                       *batch.skipped)]  # fmt: skip
    assert sorted(seen) == list(range(len(lengths)))


def test_without_a_window_batches_are_the_order_cut():
    batches = list(epoch([3, 9, 5, 4, 8], 12, window=0))
    assert [[i for i, _ in b.samples] for b in batches] == [[4, 3], [2], [1, 0]]


def test_a_sample_that_does_not_fit_waits_for_the_next_batch():
    batches = list(epoch([2, 9, 5, 4, 8], 14, window=4))
    assert [[i for i, _ in b.samples] for b in batches] == [[4, 3, 0], [2, 1]]
    assert batches[0].after == Position(2, frozenset({4}))


@settings(deadline=None)
@given(problems)
def test_by_samples_batches_are_the_order_cut(problem):
    lengths, count, window, _ = problem
    order, position, found = list(range(len(lengths))), Position(), []
    while position.start < len(order):
        batch = take(order, fits(lengths), position, count, window, by_samples=True)
        position = batch.after
        found.append([i for i, _ in batch.samples])
        assert batch.tokens == sum(lengths[i] for i in found[-1])
    kept = [i for i in order if lengths[i] <= 16]
    assert [b for b in found if b] == [kept[i : i + count] for i in range(0, len(kept), count)]
