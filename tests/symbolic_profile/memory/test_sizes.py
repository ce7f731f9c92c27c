"""Bytes as a person writes them."""

import pytest

from dcpc.symbolic_profile import bytes_of


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GB", 80_000_000_000),
        ("80 gb", 80_000_000_000),
        ("512MiB", 512 * 2**20),
        ("1.5e9", 1.5e9),
        ("1.5e3kB", 1_500_000),
        ("0.29MB", 290_000),
        ("12_000B", 12_000),
        (".5GiB", 2**29),
        ("2TB", 2 * 10**12),
        (" 17 ", 17),
    ],
)
def test_numbers_with_and_without_units(text, size):
    assert bytes_of(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "nan", "inf", "80G", "80 QB", "1e", "1,5GB"])
def test_what_is_no_number_of_bytes(text):
    assert bytes_of(text) is None


def test_a_share_stays_a_float():
    assert bytes_of("0.5") == 0.5
    assert isinstance(bytes_of("1"), float)
