"""Declarations, their errors (the text is under test), and the look-up by shape."""

import copy
import pickle
import textwrap

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcpc.buckets import MAX_BATCH, Bucket, Buckets, DimExpr, InputSpec
from dcpc.errors import BucketError, DispatchError

TEXT = {"input_ids": "int64[batch, seq]", "labels": "int64[batch, seq]"}
VIDEO = {
    "video": "float32[batch, frames, 3, h*8, 8*w]",
    "half": "bool[batch, h//2+1]",
    "scale": "float32[]",
}


def text_buckets():
    return Buckets(TEXT, [{"seq": 512}, {"seq": 2048, "batch": 4}, {"seq": 8192}])


def match_text(shape, labels_shape=None, dtype=torch.int64):
    shapes = {"input_ids": shape, "labels": labels_shape or shape}
    return text_buckets().match(shapes, {"input_ids": dtype, "labels": torch.int64})


# Dim expressions and specs


@pytest.mark.parametrize(
    ("text", "sizes", "length"),
    [
        ("seq", {"seq": 7}, 7),
        ("77", {}, 77),
        ("seq*2", {"seq": 7}, 14),
        ("2 * seq", {"seq": 7}, 14),
        ("seq+1", {"seq": 7}, 8),
        ("seq - 1", {"seq": 7}, 6),
        ("seq//2", {"seq": 7}, 3),
        ("seq*3//2+5", {"seq": 7}, 15),
    ],
)
def test_dim_evaluate_agrees_with_python_and_sympy(text, sizes, length):
    dim = DimExpr.parse(text)
    assert dim.evaluate(sizes) == length
    symbols = {name: sympy.Symbol(name, integer=True) for name in sizes}
    assert dim.sympy(symbols).subs({symbols[n]: v for n, v in sizes.items()}) == length
    assert DimExpr.parse(str(dim)) == dim


@given(st.integers(1, 50), st.integers(-50, 50), st.integers(1, 10**6))
def test_dim_solve_inverts_evaluate(multiplier, offset, size):
    dim = DimExpr("seq", multiplier=multiplier, offset=offset)
    assert dim.solve(dim.evaluate({"seq": size})) == size


def test_dim_solve_is_none_where_nothing_fits():
    assert DimExpr.parse("seq*2").solve(7) is None
    assert DimExpr.parse("seq+1").solve(1) is None
    assert DimExpr.parse("seq//2").solve(3) is None
    assert DimExpr.parse("3").solve(3) is None


def test_spec_parses_dtype_and_dims():
    spec = InputSpec.parse(" bfloat16[batch,frames , 3,h*8] ")
    assert spec.dtype == torch.bfloat16
    assert str(spec) == "bfloat16[batch, frames, 3, h*8]"
    assert spec.shape({"batch": 2, "frames": 5, "h": 4}) == (2, 5, 3, 32)
    assert InputSpec.parse("float32[]") == InputSpec(torch.float32, ())


def test_dtypes_have_torchs_other_names_too():
    inputs = {"x": "long[batch]", "y": "float[batch, 3]", "z": "half[]"}
    specs = Buckets(inputs=inputs, sizes=[{}]).inputs
    assert [str(s) for s in specs.values()] == ["int64[batch]", "float32[batch, 3]", "float16[]"]


# What a wrong declaration says


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("int46[batch]", "Buckets: inputs.x: got dtype 'int46'; expected one of bool, "),
        ("int46[batch]", "write int64"),
        ("integer[batch]", "got dtype 'integer'; expected one of bool, "),
        ("Tensor[batch]", "got dtype 'Tensor'; expected one of bool, "),
        ("nn.Linear[batch]", r"got 'nn.Linear[batch]'; expected dtype[dim, ...] such as"),
        ("int64", "got 'int64'; expected dtype[dim, ...]"),
        ("int64[batch, seq", "expected dtype[dim, ...]"),
        ("int64[batch,, seq]", "got dim ''; expected name, integer, name*2"),
        ("int64[seq**2]", "got dim 'seq**2'; expected name, integer, name*2"),
        ("int64[2*seq*2]", "got dim '2*seq*2'"),
        ("int64[seq+seq]", "got dim 'seq+seq'"),
        ("int64[-1]", "got dim '-1'"),
        ("int64[lambda]", "got dim 'lambda'"),
        ("int64[seq+1.5]", "got dim 'seq+1.5'"),
        ("int64[seq, 0]", "got dim '0'; expected integers from 1 to 2147483647 in it"),
        ("int64[seq//0]", "got dim 'seq//0'"),
        ("int64[seq*99999999999]", "expected integers from 1 to 2147483647"),
        ("int64[h//2]", "got dim 'h//2' and no other use of 'h'; expected a dim that determines"),
        (5, "inputs.x: got 5; expected a text"),
        (None, "inputs.x: got None; expected a text"),
    ],
)
def test_spec_error_names_field_got_expected(spec, message):
    with pytest.raises(BucketError) as caught:
        Buckets({"x": spec}, [{"seq": 4}])
    assert str(caught.value).startswith("Buckets: inputs.x: got")
    assert message in str(caught.value)


@pytest.mark.parametrize("size", [-1, -512, 512.0, float("nan"), True, "512", None, 2**31, [4]])
def test_size_error_names_field_got_expected(size):
    with pytest.raises(BucketError) as caught:
        Buckets(TEXT, [{"seq": 512}, {"seq": size}])
    assert str(caught.value) == (
        f"Buckets: sizes[1].seq: got {size!r}; expected an integer from 0 to 2147483647; "
        "write the exact length of this dim"
    )


@pytest.mark.parametrize(
    ("inputs", "sizes", "message"),
    [
        ({}, [{"seq": 4}], "Buckets: inputs: got {}; expected at least one entry; add one"),
        (TEXT, [], "Buckets: sizes: got []; expected at least one entry; add one"),
        (TEXT, {"seq": 4}, "Buckets: sizes: got {'seq': 4}; expected a list of sizes"),
        (TEXT, [512], "Buckets: sizes[0]: got 512; expected a mapping"),
        (TEXT, None, "Buckets: sizes: got None; expected a list"),
        ({"a b": "int64[seq]"}, [{"seq": 4}], "got argument name 'a b'; expected the name of a"),
        (
            TEXT,
            [{"seq": 4, "frames": 2}],
            "Buckets: sizes[0].frames: got dim 'frames', which no input has; expected batch, seq; "
            "remove it, or use it in an input spec",
        ),
        (TEXT, [{"batch": 4}], "sizes[0]: got {batch: 4}; expected a length for seq too; add it"),
        (
            TEXT,
            [{"seq": 4}, {"seq": 4, "batch": 2}],
            "sizes[1]: got {batch: 2, seq: 4}, the same shape as sizes[0] {seq: 4}; expected each",
        ),
        (
            {"x": "int64[seq, seq-4]"},
            [{"seq": 4}],
            "sizes[0]: got {seq: 4}, where dim 'seq-4' of input 'x' is 0; expected at least 1",
        ),
    ],
)
def test_declaration_error_says_what_to_do(inputs, sizes, message):
    with pytest.raises(BucketError) as caught:
        Buckets(inputs, sizes)
    assert message in str(caught.value)


def test_declaration_error_lists_every_wrong_field_up_to_eight():
    with pytest.raises(BucketError) as caught:
        Buckets(TEXT, [{"seq": -i} for i in range(1, 11)])
    lines = str(caught.value).splitlines()
    assert len(lines) == 9
    assert lines[7].startswith("Buckets: sizes[7].seq: got -8")
    assert lines[8] == "and 2 more"


# YAML


GOOD_YAML = """\
inputs:
  input_ids: int64[batch, seq]
  labels: int64[batch, seq]
sizes:
  - {seq: 512}
  - seq: 2048
    batch: 4
  - {seq: 8192}
"""


def read(tmp_path, text):
    file = tmp_path / "buckets.yaml"
    file.write_bytes(text if isinstance(text, bytes) else textwrap.dedent(text).encode())
    return Buckets.from_yaml(file)


def test_yaml_declares_the_same_as_python(tmp_path):
    assert read(tmp_path, GOOD_YAML) == text_buckets()


def test_yaml_round_trips(tmp_path):
    buckets = Buckets(VIDEO, [{"frames": 16, "h": 9, "w": 5}, {"frames": 1, "h": 4, "w": 4}])
    text = buckets.to_yaml(tmp_path / "out.yaml")
    assert (tmp_path / "out.yaml").read_text() == text
    assert Buckets.from_yaml(str(tmp_path / "out.yaml")) == buckets


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        ("seq: 2048", "seq: 0", ":6: sizes[1]: got {batch: 4, seq: 0}, where all inputs are empty"),
        ("batch: 4", "batch: .nan", ":7: sizes[1].batch: got nan; expected an integer from 0"),
        ("batch: 4", "batch: yes", ":7: sizes[1].batch: got True; expected an integer"),
        ("batch: 4", "seq: 4", ":7: got field 'seq' twice, first in line 6"),
        ("batch: 4", "frames: 4", ":7: sizes[1].frames: got dim 'frames', which no input has"),
        ("{seq: 8192}", "{seq: 512}", ":8: sizes[2]: got {seq: 512}, the same shape as sizes[0]"),
        ("{seq: 8192}", "{batch: 2}", ":8: sizes[2]: got {batch: 2}; expected a length for seq"),
        ("labels: int64", "labels: int46", ":3: inputs.labels: got dtype 'int46'"),
        ("sizes:", "shapes:", ":4: shapes: got [{'seq': 512}"),
        ("sizes:", "shapes:", ":1: sizes: got nothing; expected this field; add it"),
        ("{seq: 512}", "{seq: 512", ":6: not valid YAML, got "),
        ("{seq: 512}", "!!python/object/apply:os.system ['true']", ":5: not valid YAML, got could"),
        ("inputs:", "1: 2\ninputs:", ":1: [1]: got 1; expected only the fields inputs and sizes"),
    ],
)
def test_yaml_error_names_file_line_field(tmp_path, good, bad, message):
    with pytest.raises(BucketError) as caught:
        read(tmp_path, GOOD_YAML.replace(good, bad, 1))
    assert f"{tmp_path / 'buckets.yaml'}:" in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "512", "- a", "a: &a [*a]", "a: b: c", "--- 1\n--- 2", b"\xff\xfe\xfd", "[" * 5000]
)
def test_yaml_error_where_nothing_is_right(tmp_path, text):
    with pytest.raises(BucketError, match=r"buckets\.yaml:\d+: "):
        read(tmp_path, text)


def test_yaml_error_where_there_is_no_file(tmp_path):
    with pytest.raises(BucketError, match=r"none\.yaml: cannot be read, got No such file"):
        Buckets.from_yaml(tmp_path / "none.yaml")


# Reading a declaration


def test_bucket_reads_like_a_size():
    bucket = Bucket.of({"seq": 512, "batch": 4})
    assert (bucket["seq"], bucket.batch, bucket.sizes) == (512, 4, {"batch": 4, "seq": 512})
    assert str(bucket) == "{batch: 4, seq: 512}"
    assert bucket == Bucket.of({"batch": 4, "seq": 512})
    assert {bucket: 1}[Bucket.of({"batch": 4, "seq": 512})] == 1
    assert Bucket.of({"seq": 512}).batch is None


def test_buckets_names_and_ranges():
    buckets = text_buckets()
    assert buckets.names == ("batch", "seq")
    assert buckets.range_of("seq") == (512, 8192)
    assert buckets.range_of("batch") == (1, MAX_BATCH)
    assert [bucket["seq"] for bucket in buckets] == [512, 2048, 8192]
    given = Buckets(TEXT, [{"seq": 8, "batch": 4}, {"seq": 9, "batch": 2}])
    assert given.range_of("batch") == (1, 4)


def test_buckets_survive_pickle_and_deepcopy():
    buckets = text_buckets()
    for copied in (pickle.loads(pickle.dumps(buckets)), copy.deepcopy(buckets)):
        assert copied == buckets
        assert hash(copied) == hash(buckets)


# Look-up by shape


def test_match_returns_bucket_and_every_dim():
    bucket, dims = match_text((3, 2048))
    assert bucket == Bucket.of({"seq": 2048, "batch": 4})
    assert dims == {"batch": 3, "seq": 2048}


def test_match_solves_products_and_checks_the_rest():
    buckets = Buckets(VIDEO, [{"frames": 16, "h": 9, "w": 5}])
    dtypes = {"video": torch.float32, "half": torch.bool, "scale": torch.float32}
    shapes = {"video": (2, 16, 3, 72, 40), "half": (2, 5), "scale": ()}
    assert buckets.match(shapes, dtypes)[1] == {"batch": 2, "frames": 16, "h": 9, "w": 5}
    with pytest.raises(DispatchError, match=r"'half': got shape \(2, 6\); expected bool\[batch, h"):
        buckets.match({**shapes, "half": (2, 6)}, dtypes)
    with pytest.raises(DispatchError, match=r"got 73 in dim 3.*expected 'h\*8' for an integer h"):
        buckets.match({**shapes, "video": (2, 16, 3, 73, 40)}, dtypes)
    with pytest.raises(DispatchError, match="'video': got shape"):
        buckets.match({**shapes, "video": (2, 16, 4, 72, 40)}, dtypes)


def test_match_returns_the_smallest_bucket_that_holds_the_lengths():
    for seq, holding in ((1, 512), (512, 512), (2049, 8192), (8192, 8192)):
        assert match_text((1, seq)) == (Bucket.of({"seq": holding}), {"batch": 1, "seq": seq})


def test_match_returns_a_larger_bucket_where_the_smallest_is_not_for_the_lengths():
    images, clips = {"frames": 1, "h": 9}, {"frames": 4, "h": 2}
    buckets = Buckets({"x": "float32[frames, h]"}, [images, clips])
    given = {"x": (1, 2)}, {"x": torch.float32}
    assert buckets.match(*given)[0].sizes == clips
    assert buckets.match(*given, lambda b, own: b["frames"] == own["frames"])[0].sizes == images
    assert buckets.match(*given, lambda b, own: False)[0].sizes == clips


@given(st.integers(1, MAX_BATCH), st.sampled_from([512, 8192]))
def test_match_takes_any_batch_that_is_left_open(batch, seq):
    assert match_text((batch, seq)) == (Bucket.of({"seq": seq}), {"batch": batch, "seq": seq})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"shape": (4, 8193)},
            "got {batch: 4, seq: 8193}; expected lengths that some bucket holds",
        ),
        ({"shape": (5, 700)}, "bucket {batch: 4, seq: 2048}: got batch 5; expected at most 4"),
        ({"shape": (5, 2048)}, "bucket {batch: 4, seq: 2048}: got batch 5; expected at most 4"),
        ({"shape": (0, 512)}, "got 0 in dim 0, shape (0, 512); expected 'batch' for an integer"),
        ({"shape": (512,)}, "got 1 dims, shape (512,); expected 2, int64[batch, seq]"),
        (
            {"shape": (4, 512), "labels_shape": (4, 511)},
            "argument 'labels': got shape (4, 511); expected int64[batch, seq], which is (4, 512)",
        ),
        (
            {"shape": (4, 512), "dtype": torch.int32},
            "argument 'input_ids': got dtype torch.int32; expected torch.int64; convert it",
        ),
    ],
)
def test_match_error_names_argument_and_lists_buckets(arguments, message):
    with pytest.raises(DispatchError) as caught:
        match_text(**arguments)
    assert message in str(caught.value)
    assert "3 bucket(s): {seq: 512}, {batch: 4, seq: 2048}, {seq: 8192}" in str(caught.value)


def test_match_error_names_missing_and_unknown_arguments():
    with pytest.raises(DispatchError, match="missing: labels; unknown: mask"):
        text_buckets().match({"input_ids": (1, 512), "mask": (1, 512)}, {})


def test_match_error_lists_at_most_eight_buckets():
    buckets = Buckets({"x": "int64[seq]"}, [{"seq": n} for n in range(1, 11)])
    with pytest.raises(DispatchError) as caught:
        buckets.match({"x": (99,)}, {"x": torch.int64})
    assert str(caught.value).endswith(
        "10 bucket(s): " + ", ".join(f"{{seq: {n}}}" for n in range(1, 9)) + ", ..."
    )
