import ast
import sys

import pytest
import torch

from examples.stdlib_source import BEGIN, END, StdlibSource, cut, segments

SOURCE = b"""import os

class Box:
    size = 1

    @property
    def inner(self):
        try:
            pass
        except OSError:
            def late(): return 1

async def top(): pass
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a.py").write_bytes(SOURCE)
    (tmp_path / "broken.py").write_bytes(b"def f(:\n")
    for name in ("test", "tests"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "b.py").write_bytes(b"def g(): pass\n")
    return tmp_path


def test_segments_are_every_function_and_class_nested_ones_too(folder):
    found = segments(folder)
    heads = [s.split(b"(")[0].split(b":")[0].strip() for s in found]
    assert heads == [b"class Box", b"def inner", b"def late", b"async def top", b"def g"]
    assert found[0].endswith(b"return 1\n")  # the class holds its methods


def test_cut_keeps_every_byte_and_ends_at_line_borders():
    text = b"".join(b"x" * (i % 7) + b"\n" for i in range(50))
    pieces = cut(text, 20)
    assert b"".join(pieces) == text
    assert all(len(p) <= 20 and p.endswith(b"\n") for p in pieces)


def test_cut_splits_a_line_that_is_too_long():
    assert cut(b"ab\n" + b"x" * 10, 4) == [b"ab\n", b"xxxx", b"xxxx", b"xx"]


def test_sample_predicts_the_next_byte(folder):
    data = StdlibSource(1024, folder)
    sample = data[4]
    assert sample["input_ids"].tolist() == [BEGIN, *b"def g(): pass\n"]
    assert sample["labels"].tolist() == [*b"def g(): pass\n", END]
    assert sample["labels"].dtype == torch.int64


def test_dims_are_the_samples_lengths_and_fit_the_bucket(folder):
    data = StdlibSource(32, folder)
    lengths = [len(data[i]["input_ids"]) for i in range(len(data))]
    assert lengths == [data.dims(i)["seq"] for i in range(len(data))]
    assert max(lengths) <= 32
    assert data.counts.cuts == len(data) - data.counts.segments > 0


def test_each_fourth_byte_is_a_token_at_any_cut(folder):
    whole = StdlibSource(1024, folder, every=4)
    assert whole[4]["labels"].tolist() == [*b"def g(): pass\n"[::4], END]
    short = whole.cut_at(6)
    assert max(short.dims(i)["seq"] for i in range(len(short))) == 6


@pytest.mark.slow
def test_standard_library_is_read_alike_twice():
    once, again = segments(), segments()
    assert once == again
    assert len(once) > 10_000
    assert any(ast.parse(s) for s in once[:1])
    if sys.version_info[:3] == (3, 11, 7):
        assert len(once) == 22_095
        assert max(map(len, once)) == 118_563
