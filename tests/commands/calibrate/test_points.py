"""Which sizes are timed."""

from dcpc.buckets import Bucket
from dcpc.commands.calibrate.points import (
    choose_points,
    shorter_points,
    trial_point,
    turning_points,
)

LENGTHS = [Bucket.of({"seq": n}) for n in (512, 64, 128, 256, 1024, 2048, 4096)]


def chosen(buckets=LENGTHS, seconds=lambda s: 0.0, fits=lambda s: True, batched=True):
    return choose_points(buckets, seconds, fits, limit_s=8.0, batched=batched)


def test_lengths_over_the_whole_range_and_wider_short_ones():
    found = chosen()
    assert [p["seq"] for p in found if p["batch"] == 1] == [64, 256, 1024, 4096]
    assert {"seq": 64, "batch": 32} in found
    assert {"seq": 256, "batch": 8} in found
    assert len(found) == 6


def test_what_takes_longer_than_its_share_is_left_out():
    found = chosen(seconds=lambda s: s["batch"] * s["seq"] / 600)
    assert max(p["seq"] * p["batch"] for p in found) == 1024


def test_trial_is_the_longest_that_ends_in_time_or_else_the_shortest():
    def seconds(sizes):
        return sizes["batch"] * sizes["seq"] / 600

    assert trial_point(LENGTHS, seconds, 1.0, True) == {"seq": 512, "batch": 1}
    assert trial_point(LENGTHS, seconds, 0.01, True) == {"seq": 64, "batch": 1}


def test_shorter_sequences_have_as_many_tokens():
    assert shorter_points({"seq": 64, "batch": 8}) == [
        {"seq": 16, "batch": 32}, {"seq": 32, "batch": 16},
    ]  # fmt: skip
    assert shorter_points({"seq": 32, "batch": 8}) == [{"seq": 16, "batch": 16}]
    assert shorter_points({"height": 32, "width": 32, "batch": 8}) == []


def test_shortest_stays_whatever_it_takes():
    assert chosen(seconds=lambda s: 100.0) == [{"seq": 64, "batch": 1}]
    assert chosen(fits=lambda s: False) == [{"seq": 64, "batch": 1}]


def test_without_a_batch_there_are_lengths_alone():
    assert chosen(batched=False) == [{"seq": n} for n in (64, 256, 1024, 4096)]


def test_one_bucket_is_one_length():
    only = [Bucket.of({"seq": 64, "batch": 8})]
    assert chosen(only) == [{"seq": 64, "batch": 1}]


def test_turning_points_lie_on_both_sides_of_a_change():
    found = turning_points({"seq": 512}, {"seq": 1024}, lambda s: s["seq"] >= 768)
    lengths = [p["seq"] for p in found]
    assert lengths == sorted(lengths)
    assert max(n for n in lengths if n < 768) > 755
    assert min(n for n in lengths if n >= 768) < 780


def test_without_a_change_there_are_two_between():
    found = turning_points({"seq": 64, "batch": 1}, {"seq": 512, "batch": 1}, lambda s: 0)
    assert found == [{"seq": 128, "batch": 1}, {"seq": 256, "batch": 1}]
