"""Rates that made the seconds are found again, and lines never go below zero."""

import random
from dataclasses import replace

import pytest
import torch

from dcpc.commands.calibrate import fitted
from dcpc.commands.calibrate.fit import (
    VIEW,
    TimedCall,
    bent,
    curve,
    fit_classes,
    line,
    predicted_s,
    product_rates,
)
from dcpc.commands.calibrate.measure import Whole
from dcpc.symbolic_profile import ClassFit

LAUNCH_S, PER_FLOP, PER_BYTE = 5e-6, 1e-11, 2e-10


def sample(op_class="matmul", forward=True, flops=0.0, moved=0.0, seconds=0.0):
    return TimedCall(op_class, forward, torch.float32, flops, moved, seconds)


def made(count=40, noise=0.0, **of):
    draw = random.Random(0)
    found = []
    for _ in range(count):
        flops, moved = 10 ** draw.uniform(5, 10), 10 ** draw.uniform(4, 8)
        seconds = LAUNCH_S + flops * PER_FLOP + moved * PER_BYTE
        found.append(
            sample(
                flops=flops, moved=moved, seconds=seconds * (1 + noise * draw.uniform(-1, 1)), **of
            )
        )
    return found


def test_line_recovers_the_rates():
    fit = line(made())
    assert fit.launch_s == pytest.approx(LAUNCH_S, rel=1e-3)
    assert fit.s_per_flop == pytest.approx(PER_FLOP, rel=1e-6)
    assert fit.s_per_byte == pytest.approx(PER_BYTE, rel=1e-6)


def test_line_of_noise_keeps_the_total():
    samples = made(noise=0.3)
    total = sum(s.seconds_s for s in samples)
    assert sum(predicted_s([line(samples)], samples)) == pytest.approx(total, rel=1e-3)


def test_line_has_no_negative_rate():
    falling = [sample(flops=f, moved=1e6, seconds=1e-3 - 1e-10 * f) for f in (1e5, 1e6, 5e6)]
    fit = line(falling)
    assert min(fit.launch_s, fit.s_per_flop, fit.s_per_byte) == 0.0
    assert fit.s_per_flop == 0.0


def test_bytes_beyond_a_cache_cost_more():
    far = [
        replace(s, seconds_s=s.seconds_s + max(0.0, s.bytes_moved - 1e6) * 3 * PER_BYTE)
        for s in made(200)
    ]
    fit = bent(far)
    assert fit.near_bytes == pytest.approx(1e6, rel=0.3)
    assert fit.s_per_far_byte == pytest.approx(3 * PER_BYTE, rel=0.1)
    for moved in (2e4, 5e5, 6e6, 9e7):
        seconds = LAUNCH_S + moved * PER_BYTE + max(0.0, moved - 1e6) * 3 * PER_BYTE
        assert fit.launch_s + fit.busy_s(0.0, moved) == pytest.approx(seconds, rel=0.15)
    assert bent(made(200)).s_per_far_byte < 0.01 * PER_BYTE


def test_curve_has_a_launch_where_equal_calls_of_more_rows_tell():
    rates = {10.0: 4e-11, 100.0: 1e-11}
    samples = [
        sample("attention", True, x * rows, rows, 2e-4 + x * rows * y)
        for x, y in rates.items()
        for rows in (1e5, 1e7)
    ]
    fit = curve(samples)
    assert fit.launch_s == pytest.approx(2e-4, rel=1e-3)
    assert [y for _, y in fit.knots] == pytest.approx(list(rates.values()), rel=1e-2)
    alone = curve([s for s in samples if s.bytes_moved > 1e6])
    assert alone.launch_s == 0.0


def test_curve_passes_through_its_points_and_between_them():
    at = {10.0: 4e-11, 100.0: 1e-11}  # FLOPs a byte -> seconds a FLOP
    fit = curve([sample("attention", True, x * 1e6, 1e6, x * 1e6 * y) for x, y in at.items()])
    for x, y in at.items():
        assert fit.busy_s(x * 5e6, 5e6) == pytest.approx(x * 5e6 * y)
    middle = fit.busy_s(10**1.5 * 1e6, 1e6) / (10**1.5 * 1e6)
    assert middle == pytest.approx(2e-11)  # the geometric mean
    assert fit.busy_s(1e9, 1e6) == pytest.approx(1e9 * 1e-11)  # no rate is made up beyond


def test_below_its_first_point_a_curve_goes_on_as_it_begins_up_to_a_constant():
    def curved(ratio):
        knots = ((10.0, ratio * 1e-11), (20.0, 1e-11))
        return ClassFit("attention", True, torch.float32, 0.0, knots=knots)

    assert curved(2.0).busy_s(5.0, 1.0) == pytest.approx(5.0 * 4e-11)
    # A half as long one has a quarter of the FLOPs, and takes as long.
    assert curved(9.0).busy_s(25.0, 5.0) == pytest.approx(curved(9.0).busy_s(100.0, 10.0))
    assert curved(0.5).busy_s(5.0, 1.0) == pytest.approx(5.0 * 0.5e-11)


def test_views_are_shared_out_over_their_direction():
    samples = [*made(10), *made(10, forward=False), sample(VIEW, seconds=1e-4)]
    forward, backward = sorted(fit_classes(samples), key=lambda f: not f.forward)
    assert forward.launch_s == pytest.approx(LAUNCH_S + 1e-5, rel=1e-3)
    assert backward.launch_s == pytest.approx(LAUNCH_S, rel=1e-3)


def test_products_have_the_rate_of_the_larger_half():
    small = [sample(flops=1e3, seconds=1.0)] * 2
    large = [sample(flops=1e9 + i, seconds=(1e9 + i) / 5e10) for i in range(4)]
    assert dict(product_rates([*small, *large]))[torch.float32] == pytest.approx(5e10)


def wholes(fused):
    """Runs in which everything but products takes `fused` of what it takes alone."""
    found = []
    for size in (1e5, 1e6, 1e7):
        samples = tuple(
            sample(kind, forward, size * 100, size, LAUNCH_S + size * PER_BYTE)
            for kind in ("matmul", "pointwise")
            for forward in (True, False)
        )
        seconds = (LAUNCH_S + size * PER_BYTE) * (1 + fused)
        found.append(Whole({"seq": int(size)}, samples, seconds, seconds))
    return found


def test_what_a_compiler_fuses_is_scaled_and_products_are_not():
    fits, points = fitted(wholes(0.25), apart={"matmul"})
    rates = {f.op_class: f.busy_s(0.0, 1.0) or f.busy_s(100.0, 0.0) for f in fits.classes}
    assert rates["pointwise"] == pytest.approx(0.25 * rates["matmul"], rel=1e-3)
    assert fits.error < 1e-3
    assert all(p.predicted_s == pytest.approx(p.measured_s, rel=1e-3) for p in points)


def test_error_says_what_the_fits_miss():
    runs = wholes(1.0)
    runs = [Whole(w.sizes, w.samples, w.forward_s * f, w.backward_s * f)
            for w, f in zip(runs, (0.8, 1.0, 1.25), strict=True)]  # fmt: skip
    fits, points = fitted(runs)
    missed = sorted(abs(p.predicted_s / p.measured_s - 1) for p in points)
    assert fits.error == pytest.approx(missed[1])
    assert fits.error > 0.15


def test_launches_and_the_rest_are_scaled_apart():
    def run(size, launch, rest):
        samples = tuple(
            sample("pointwise", True, size * 100, size, LAUNCH_S + size * PER_BYTE)
            for _ in range(5)
        )
        seconds = 5 * (LAUNCH_S * launch + size * PER_BYTE * rest)
        return Whole({"seq": int(size)}, samples, seconds, 0)

    fits, points = fitted([run(size, 0.4, 1.2) for size in (1e4, 1e5, 1e6, 1e7)])
    (fit,) = fits.classes
    assert fit.launch_s == pytest.approx(0.4 * LAUNCH_S, rel=1e-2)
    assert all(p.predicted_s == pytest.approx(p.measured_s, rel=1e-2) for p in points)
    fits, points = fitted([run(size, 0.5, 0.5) for size in (1e5, 1e7)])  # of two one factor is told
    assert fits.error < 1e-2
