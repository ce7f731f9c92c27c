import numpy as np
import pytest
import sympy

from dcpc.errors import ProfileError
from dcpc.symbolic_profile import detect, evaluator, find, profile_partition
from dcpc.symbolic_profile.polynomials import Basis, QueryBlock, undominated
from tests.cases.joint_graphs import BATCH, GPT, SEQ, capture, case


def test_arrays_of_sizes_give_each_points_value():
    at = evaluator(profile_partition(case("gpt").partition))
    batch, seq = np.array([1, 2, 4]), np.array([100, 900, 300])
    points = [{"batch": int(b), "seq": int(s)} for b, s in zip(batch, seq, strict=True)]
    dims = {"batch": batch, "seq": seq}
    h200 = find("h200")
    assert list(at.peak_bytes(dims)) == [at.peak_bytes(p) for p in points]
    assert list(at.flops(dims)) == [at.flops(p) for p in points]
    assert list(at.seconds(dims, h200)) == pytest.approx([at.seconds(p, h200) for p in points])


def test_peak_is_the_largest_term_by_sympy():
    profile = profile_partition(case("llama").partition)
    at = evaluator(profile)
    terms = [int(t.subs({BATCH: 7, SEQ: 801}).doit()) for t in profile.peak_terms]
    assert at.peak_bytes({"batch": 7, "seq": 801}) == max(terms)


@pytest.mark.parametrize("layers", [2, 5])
def test_a_point_is_few_terms_and_as_much_work_for_any_depth(layers):
    profile = profile_partition(capture(GPT(layers=layers)).partition)
    assert len(profile.peak_terms) <= 6 * layers + 5, "undominated points of the timeline"
    assert len(profile.work) == 32, "equal calls of all layers are priced once"


def test_dominated_term_is_dropped_for_all_sizes_from_one():
    # batch*seq + 5 >= batch + 5 since seq >= 1, though neither coefficient vector dominates
    sizes = [BATCH * SEQ + 5, BATCH + 5, 2 * SEQ, BATCH * SEQ + 5]
    basis = Basis(sizes)
    assert undominated(basis.matrix(sizes), basis) == [0, 2]


def test_term_that_is_larger_at_length_zero_is_kept():
    length = sympy.Symbol("seq_length", integer=True, nonnegative=True)
    sizes = [8 * length, sympy.Integer(4)]
    basis = Basis(sizes)
    assert undominated(basis.matrix(sizes), basis) == [0, 1]


def test_functions_of_sizes_are_compiled():
    half = sympy.Function("FloorDiv")(SEQ, 2)
    basis = Basis([half * BATCH + sympy.Min(512, SEQ) + QueryBlock(SEQ)])
    values = basis.compile([BATCH, SEQ])(3, 801)
    assert dict(zip(basis.terms, map(int, values), strict=True)) == {
        half * BATCH: 1200,
        sympy.Min(512, SEQ): 512,
        QueryBlock(SEQ): 256,
    }


def test_missing_dim_is_named():
    at = evaluator(profile_partition(case("gpt").partition))
    with pytest.raises(ProfileError, match=r"got sizes for batch; .* batch, seq; add seq"):
        at.peak_bytes({"batch": 4})


def test_profile_leaves_the_graphs_alone():
    partition = case("gpt").partition
    before = [str(partition.forward.graph), str(partition.backward.graph)]
    profile_partition(partition)
    assert [str(partition.forward.graph), str(partition.backward.graph)] == before


def test_faster_device_takes_less_time():
    at, dims = evaluator(profile_partition(case("gpt").partition)), {"batch": 64, "seq": 4096}
    seconds = [at.seconds(dims, find(name)) for name in ("h200", "h100", "a100-40gb", "cpu")]
    assert seconds == sorted(seconds)


def test_unknown_device_names_the_known_ones():
    with pytest.raises(ProfileError, match="got 'tpu'; expected one of h200, h100"):
        find("tpu")


def test_cpu_is_detected():
    assert detect().memory_bytes > 1e9
