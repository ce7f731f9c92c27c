import json
import warnings
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpc.buckets import Bucket, Buckets
from dcpc.errors import DataError
from dcpc.runtime.data.loader import DataLoader
from dcpc.runtime.data.samples import Samples
from dcpc.runtime.data.weights import CountLabels
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.planner.splits.advice import padding_advice
from tests.cases.fakes import FakeCompiled, Ragged, RaggedWithDims, compiled_for, plan_for

SETTINGS = {4: (1, 3), 7: (1, 2), 16: (2, 1)}
PAD = {"input_ids": 0, "labels": -100}
LENGTHS = [4, 2, 16, 7, 5, 1, 16, 12, 4, 4, 3, 7, 9]


def world(size: int, rank: int = 0) -> Groups:
    """Groups of a rank that communicates with nobody."""
    return Groups(size, rank, global_ranks=tuple(range(size)))


def loader_for(dataset, groups=None, **options) -> DataLoader:
    groups = groups or world(2)
    options = {"tokens_per_step": 20, "pad": PAD, "lookahead": 0, **options}
    return DataLoader(dataset, compiled_for(groups, SETTINGS), **options)


def sample_ids(steps) -> list[int]:
    return [i for step in steps for mb in step.plan.micro_batches for i in mb.sample_ids]


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(1, 16), min_size=1, max_size=40),
    st.sampled_from([2, 4, 8]),
    st.integers(1, 100),
    st.integers(0, 2),
)
def test_epoch_has_every_sample_once(lengths, size, tokens_per_step, lookahead):
    options = {"tokens_per_step": tokens_per_step, "lookahead": lookahead}
    steps = list(loader_for(RaggedWithDims(lengths), world(size), **options))
    assert sorted(sample_ids(steps)) == list(range(len(lengths)))
    for step in steps:
        own = sum(lengths[i] for mb in step.plan.micro_batches for i in mb.sample_ids)
        assert step.tokens == own
        assert own <= tokens_per_step or step.samples == 1
    assert [step.index for step in steps] == list(range(len(steps)))


def test_ranks_make_the_same_plan_and_load_only_their_own():
    data = [RaggedWithDims(LENGTHS) for _ in range(2)]
    steps = [list(loader_for(d, world(2, r))) for r, d in enumerate(data)]
    assert [s.plan for s in steps[0]] == [s.plan for s in steps[1]]
    for r in range(2):
        own = [i for s in steps[r] for mb in s.plan.of(r) for i in mb.sample_ids]
        assert (
            data[r].loaded
            == own
            == [i for s in steps[r] for m in s.micro_batches for i in m.samples]
        )


def test_order_depends_on_seed_and_epoch_alone():
    def order(**options):
        loader = loader_for(RaggedWithDims(LENGTHS), **options)
        return [sample_ids(loader), sample_ids(loader)]

    first, second = order(seed=1)
    assert [first, second] == order(seed=1)
    assert first != second
    assert first != order(seed=2)[0]
    loader = loader_for(RaggedWithDims(LENGTHS), seed=1)
    loader.set_epoch(1)
    assert sample_ids(loader) == second


def test_going_back_after_a_resume_is_said():
    first = loader_for(RaggedWithDims(LENGTHS), seed=1)
    list(first)
    next(iter(first))
    loader = loader_for(RaggedWithDims(LENGTHS), seed=1)
    loader.load_state_dict(first.state_dict())
    assert loader.epoch == 1
    loader.set_epoch(1)
    with pytest.warns(UserWarning, match=r"got 0 for a loader that resumes in epoch 1"):
        loader.set_epoch(0)


def test_dataset_without_dims_loads_a_sample_once_for_length_and_use():
    data = Ragged(LENGTHS)
    compiled = compiled_for(world(1), {16: (1, 4)})
    list(DataLoader(data, compiled, tokens_per_step=1000, pad=PAD, shuffle=False))
    assert data.loaded == list(range(len(LENGTHS)))


def test_sample_goes_to_the_smallest_bucket_and_is_padded_at_its_end():
    data = RaggedWithDims([5])
    (step,) = loader_for(data, shuffle=False)
    (mb,) = step.micro_batches
    assert mb.bucket["seq"] == 7
    assert mb.inputs["labels"].shape == (1, 7)
    assert torch.equal(mb.inputs["input_ids"][0, :5], data[0]["input_ids"])
    assert mb.inputs["labels"][0, 5:].tolist() == [-100, -100]


@pytest.mark.parametrize("stop", [1, 3])
@pytest.mark.parametrize("size", [2, 4])
def test_state_resumes_in_the_middle_at_any_world_size(stop, size):
    reference = loader_for(RaggedWithDims(LENGTHS), seed=3)
    expected = [sample_ids([s]) for s in reference] + [sample_ids([s]) for s in reference]
    loader = loader_for(RaggedWithDims(LENGTHS), seed=3, lookahead=2)
    for _, _step in zip(range(stop), loader, strict=False):
        state = json.loads(json.dumps(loader.state_dict()))
    again = loader_for(RaggedWithDims(LENGTHS), world(size))
    again.load_state_dict(state)
    resumed = list(again)
    assert resumed[0].index == stop
    rest = [sorted(sample_ids([s])) for s in (*resumed, *again)]
    assert rest == [sorted(ids) for ids in expected[stop:]]


def test_state_after_the_last_step_is_the_next_epoch():
    loader = loader_for(RaggedWithDims(LENGTHS))
    for _ in loader:
        state = loader.state_dict()
    assert (state["epoch"], state["consumed"], state["step"]) == (1, 0, 0)


def test_state_of_another_dataset_is_refused():
    state = loader_for(RaggedWithDims([4, 4])).state_dict()
    with pytest.raises(DataError, match="got samples=2; expected 13"):
        loader_for(RaggedWithDims(LENGTHS)).load_state_dict(state)


def test_iteration_left_early_starts_afresh():
    loader = loader_for(RaggedWithDims(LENGTHS), lookahead=2)
    next(iter(loader))
    assert sorted(sample_ids(loader)) == list(range(len(LENGTHS)))


def test_weights_count_samples_or_labels():
    data = RaggedWithDims([4, 4])
    options = {"shuffle": False, "groups": world(1)}
    labels = [float((data[i]["labels"] != -100).sum()) for i in range(2)]

    def weights(weight):
        loader = loader_for(data, weight=weight, **options)
        loader.compiled = compiled_for(world(1), {4: (1, 1)})
        (step,) = loader
        return [mb.weight for mb in step.micro_batches], step.total_weight

    assert weights("samples") == ([1.0, 1.0], 2.0)
    assert weights("labels") == (labels, None)
    assert weights(CountLabels("labels", shift=4)) == ([0.0, 0.0], None)
    assert weights(lambda inputs: 2.5) == ([2.5, 2.5], None)
    with pytest.raises(DataError, match="got nan; expected a finite number"):
        weights(lambda inputs: float("nan"))


def test_sample_too_long_is_an_error_that_names_it():
    with pytest.raises(DataError, match=r"sample 1: got \{seq: 17\}.*at most \{seq: 16\}"):
        list(loader_for(RaggedWithDims([4, 17]), shuffle=False))


def test_skipped_samples_are_counted_and_warned_of():
    loader = loader_for(RaggedWithDims([4, 17, 5, 99]), on_too_long="skip", shuffle=False)
    with pytest.warns(UserWarning, match=r"got 2 of 4 samples longer.*\(1, 3\)"):
        assert sorted(sample_ids(loader)) == [0, 2]
    assert loader.skipped == (1, 3)
    with pytest.raises(DataError, match="got 1 of 1 samples longer than every bucket"):
        list(loader_for(RaggedWithDims([99]), on_too_long="skip"))


def test_error_in_the_thread_reaches_the_loop():
    with pytest.raises(DataError, match="sample 2"):
        list(loader_for(RaggedWithDims([4, 4, 17]), shuffle=False, lookahead=3, tokens_per_step=4))


class Fixed(list):
    """A dataset of given samples."""


def ids_of(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"input_ids": ids_of(4)}, "sample 0: got input_ids; expected a mapping with exactly"),
        (ids_of(4), "sample 0: got Tensor; expected a mapping"),
        ({"input_ids": ids_of(4), "labels": ids_of(3)}, "input 'labels': got 3 for dim 'seq'"),
        ({"input_ids": ids_of(0), "labels": ids_of(0)}, "got 0 for dim 'seq'.*no length >= 1"),
        ({"input_ids": ids_of(4), "labels": [1] * 4}, r"got list; expected a tensor int64\[seq\]"),
        (
            {"input_ids": ids_of(4, dtype=torch.int32), "labels": ids_of(4)},
            r"input 'input_ids': got torch.int32 \(4,\); expected a tensor int64\[seq\]",
        ),
        ({"input_ids": ids_of(1, 4), "labels": ids_of(4)}, r"got torch.int64 \(1, 4\)"),
    ],
)
def test_malformed_sample_is_named(sample, message):
    with pytest.raises(DataError, match=message):
        list(loader_for(Fixed([sample])))


@pytest.mark.parametrize("length", [float("nan"), 0, True, "4", None])
def test_malformed_length_is_named(length):
    data = RaggedWithDims([length])
    with pytest.raises(DataError, match=r"dims\(0\): got \{'seq': .*an integer >= 1"):
        list(loader_for(data))


def test_dims_that_disagree_with_the_sample_are_refused():
    data = RaggedWithDims([4])
    data.dims = lambda i: {"seq": 3}
    with pytest.raises(DataError, match=r"got lengths \{seq: 4\}; expected \{seq: 3\}"):
        list(loader_for(data))


def test_missing_pad_value_says_what_to_pass():
    with pytest.raises(
        DataError, match=r"input 'labels': got shape \(5,\).*pad=\{'labels': -100\}"
    ):
        list(loader_for(RaggedWithDims([5]), pad={"input_ids": 0}))
    list(loader_for(RaggedWithDims([4, 7, 16]), pad=None))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens_per_step": 0}, "tokens_per_step: got 0; expected an integer >= 1"),
        ({"tokens_per_step": float("nan")}, "tokens_per_step: got nan"),
        ({"pad": {"ids": 0}}, "pad=: got ids; expected names of inputs: input_ids, labels"),
        ({"weight": "label"}, "weight=: got 'label'; expected 'samples', an input"),
        ({"on_too_long": "cut"}, "got on_too_long='cut'"),
        ({"samples_per_step": 4}, "tokens_per_step=20, samples_per_step=4: got both"),
        ({"tokens_per_step": None}, "tokens_per_step=None, samples_per_step=None: got neither"),
        ({"tokens_per_step": None, "samples_per_step": 0}, "samples_per_step: got 0"),
        (
            {"tokens_per_step": None, "samples_per_step": 4, "max_grad_accumulation_steps": 2},
            "samples_per_step=4: got bounds",
        ),
    ],
)
def test_wrong_argument_is_named(options, message):
    with pytest.raises(DataError, match=message):
        loader_for(RaggedWithDims([4]), **options)


def bytes_buckets() -> Buckets:
    return Buckets(
        inputs=dict.fromkeys(("input_ids", "labels"), "uint8[batch, seq]"), sizes=[{"seq": 4}]
    )


def test_a_pad_value_that_a_dtype_has_not_is_refused():
    buckets = bytes_buckets()
    compiled = FakeCompiled(buckets, {b: plan_for(b, 1, 1) for b in buckets}, world(1))
    x = torch.zeros(3, dtype=torch.uint8)
    data = [{"input_ids": x, "labels": x}]
    with pytest.raises(DataError, match=r"'labels': got -100 to fill up torch.uint8"):
        DataLoader(data, compiled, tokens_per_step=4, pad={"input_ids": 0, "labels": -100})
    for value in (0.5, 300, float("inf")):
        with pytest.raises(DataError, match=f"'labels': got {value} to fill up"):
            DataLoader(data, compiled, tokens_per_step=4, pad={"labels": value})
    DataLoader(data, compiled, tokens_per_step=4, pad={"input_ids": 0.0, "labels": 255})


def test_a_byte_that_wraps_to_the_ignored_label_counts():
    labels = torch.tensor([[156, 1, 2]], dtype=torch.uint8)  # 156 = -100 modulo 256
    assert CountLabels("labels")({"labels": labels}) == 3.0
    assert CountLabels("labels", ignore_index=156)({"labels": labels}) == 2.0


def test_empty_dataset_is_refused():
    with pytest.raises(DataError, match="dataset: got 0 samples"):
        loader_for(RaggedWithDims([]))


def test_inputs_of_several_dims_and_of_no_batch():
    buckets = Buckets(
        inputs={
            "x": "float32[2, batch, frames*3, width//2]",
            "size": "int64[batch, frames, width]",
            "scale": "float32[]",
        },
        sizes=[{"frames": 2, "width": 5}, {"frames": 4, "width": 4}],
    )
    compiled = FakeCompiled(buckets, {b: plan_for_video(b) for b in buckets}, world(1))

    def sample(frames: int, width: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
        return {
            "x": torch.ones(2, frames * 3, width // 2),
            "size": torch.ones(frames, width, dtype=torch.int64),
            "scale": torch.tensor(scale),
        }

    pad = {"x": 0.0, "size": 0}
    data = Fixed([sample(2, 5), sample(1, 5), sample(3, 4)])
    options = {"tokens_per_step": 100, "pad": pad, "pad_to": "bucket", "shuffle": False}
    loader = DataLoader(data, compiled, **options)
    (step,) = loader
    assert [mb.samples for mb in step.micro_batches] == [(0, 1), (2,)]
    assert step.micro_batches[0].inputs["x"].shape == (2, 2, 6, 2)
    assert step.micro_batches[0].inputs["scale"].shape == ()
    assert step.tokens == 10 + 5 + 12
    data[1] = sample(1, 5, scale=2.0)
    with pytest.raises(DataError, match=r"input 'scale'.*different values in samples 0 and 1"):
        list(DataLoader(data, compiled, **options))


def plan_for_video(bucket):
    return plan_for(bucket, 1, 2, seconds_s=float(bucket["frames"]))


def test_no_warning_without_a_reason():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(loader_for(RaggedWithDims(LENGTHS), lookahead=2))


def runs(step) -> list[int]:
    """Micro-batches of each rank."""
    return [len(step.plan.of(rank)) for rank in range(len(step.plan.busy_s))]


def test_intra_has_one_bucket_a_step():
    steps = list(loader_for(RaggedWithDims(LENGTHS), mode="intra"))
    assert sorted(sample_ids(steps)) == list(range(len(LENGTHS)))
    assert all(len({mb.bucket for mb in s.plan.micro_batches}) == 1 for s in steps)
    assert {s.plan.mode for s in steps} == {"intra"}
    with pytest.raises(DataError, match="got mode 'intra', whose steps have one bucket"):
        loader_for(RaggedWithDims(LENGTHS), mode="intra", max_grad_accumulation_steps=3)


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.integers(1, 16), min_size=1, max_size=50),
    st.integers(1, 60),
    st.integers(1, 3),
    st.integers(0, 3),
    st.sampled_from(["inter", "auto"]),
)
def test_accumulation_is_within_its_bounds(lengths, tokens, least, more, mode):
    options = {"min_grad_accumulation_steps": least, "max_grad_accumulation_steps": least + more}
    steps = list(loader_for(RaggedWithDims(lengths), tokens_per_step=tokens, mode=mode, **options))
    assert sorted(sample_ids(steps)) == list(range(len(lengths)))
    for step in steps:
        assert max(runs(step)) <= least + more
    # A batch grows until it has enough; at the end, or before a cut, there may be no more samples.
    if more and len(steps) > 2:
        assert max(runs(steps[0])) >= least


def test_a_batch_grows_by_a_sample_longer_than_itself():
    options = {"min_grad_accumulation_steps": 2, "max_grad_accumulation_steps": 3}
    steps = list(
        loader_for(RaggedWithDims([1, 1, 4, 6]), tokens_per_step=2, mode="inter", **options)
    )
    assert [max(runs(step)) for step in steps] == [2, 1]


def test_bounds_in_the_wrong_order_are_refused():
    options = {"min_grad_accumulation_steps": 4, "max_grad_accumulation_steps": 3}
    with pytest.raises(DataError, match=r"max_grad_accumulation_steps: got 3; expected.*>= 4"):
        loader_for(RaggedWithDims([4]), mode="inter", **options)


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.integers(1, 16), min_size=1, max_size=40),
    st.integers(0, 12),
    st.integers(0, 9),
    st.sampled_from(["intra", "inter", "auto"]),
    st.sampled_from(["intra", "inter", "auto"]),
    st.sampled_from([2, 4, 8]),
)
def test_resumed_in_another_mode_and_world_every_sample_is_trained_once(
    lengths, window, stop, mode, other, size
):
    loader = loader_for(RaggedWithDims(lengths), mode=mode, window=window, lookahead=2)
    first, state = [], loader.state_dict()
    for _, step in zip(range(stop), loader, strict=False):
        first.append(step)
        state = json.loads(json.dumps(loader.state_dict()))
    again = loader_for(RaggedWithDims(lengths), world(size), mode=other)
    again.load_state_dict(state)
    if state["epoch"] == 0:
        assert sorted(sample_ids([*first, *again])) == list(range(len(lengths)))
    else:
        assert sorted(sample_ids(first)) == list(range(len(lengths)))


def test_state_with_places_that_are_no_list_is_refused():
    loader = loader_for(RaggedWithDims([4, 4]))
    with pytest.raises(DataError, match="'ahead': got 3; expected a list of places"):
        loader.load_state_dict({**loader.state_dict(), "ahead": 3})


def test_window_fills_batches_better_than_the_order_alone():
    lengths = [3, 16, 2, 9, 1, 12, 4, 7, 16, 2] * 6
    counts = [
        len(list(loader_for(RaggedWithDims(lengths), tokens_per_step=24, window=w)))
        for w in (0, 30)
    ]
    assert counts[1] < counts[0]


def test_imbalance_is_logged_where_asked(caplog):
    with caplog.at_level("INFO", logger="dcpc"):
        list(loader_for(RaggedWithDims([4, 4]), calculate_imbalance=True))
    assert "step 0 of epoch 0: 2 samples, 8 tokens; predicted" in caplog.text
    assert "gap to the lower bound" in caplog.text


@pytest.mark.parametrize("kind", [Ragged, RaggedWithDims])
def test_a_dataset_may_refill_one_buffer(kind):
    class Refilled(kind):
        def __getitem__(self, index):
            for name, x in super().__getitem__(index).items():
                buffers[name][: len(x)] = x
            return {name: buffer[: len(x)] for name, buffer in buffers.items()}

    buffers = {name: torch.zeros(16, dtype=torch.int64) for name in PAD}
    every = [list(loader_for(d(LENGTHS), shuffle=False)) for d in (kind, Refilled)]
    for plain, refilled in zip(*every, strict=True):
        for a, b in zip(plain.micro_batches, refilled.micro_batches, strict=True):
            assert all(torch.equal(x, b.inputs[name]) for name, x in a.inputs.items())


@pytest.mark.parametrize("mode", ["auto", "intra"])
@pytest.mark.parametrize("size", [{"tokens_per_step": 20}, {"samples_per_step": 4}])
@pytest.mark.parametrize("on_too_long", ["error", "skip"])
def test_steps_of_an_epoch_are_counted_without_planning(mode, size, on_too_long):
    lengths = [*LENGTHS, 17] if on_too_long == "skip" else LENGTHS
    options = {"tokens_per_step": None, **size, "mode": mode, "on_too_long": on_too_long}
    loader = loader_for(Ragged(lengths), **options)
    counts = [loader.count_steps(epoch) for epoch in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert [len(list(loader)) for _ in range(3)] == counts


def test_a_step_of_so_many_samples_is_the_next_of_the_order():
    loader = loader_for(
        RaggedWithDims(LENGTHS), tokens_per_step=None, samples_per_step=4, shuffle=False
    )
    steps = list(loader)
    assert [sorted(sample_ids([step])) for step in steps] == [
        [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12]
    ]  # fmt: skip
    assert (loader.samples_per_step, loader.tokens_per_step) == (4, None)
    assert len(loader) == len(steps) == 4


def test_a_loader_of_tokens_has_no_length_and_says_what_counts():
    loader = loader_for(Ragged(LENGTHS))
    with pytest.raises(TypeError, match=r"call loader\.count_steps\(epoch\)") as told:
        len(loader)
    assert isinstance(told.value, DataError)
    assert loader  # has no length that could be 0
    assert list(loader)


def test_a_loader_whose_steps_follow_from_plans_is_not_counted():
    loader = loader_for(Ragged(LENGTHS), max_grad_accumulation_steps=2)
    with pytest.raises(DataError, match="count_steps: got bounds"):
        loader.count_steps(0)


def test_an_order_of_ones_own_is_that_of_each_epoch():
    data = RaggedWithDims([4, 5, 6, 7])

    def turned(epoch: int) -> list[int]:
        return [(i + epoch) % 4 for i in range(4)]

    loader = loader_for(data, order=turned, samples_per_step=1, tokens_per_step=None)
    for epoch in range(3):
        steps = [step.plan.micro_batches[0].sample_ids for step in loader]
        assert steps == [(i,) for i in turned(epoch)]


@pytest.mark.parametrize("wrong", [[0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 4]])
def test_an_order_without_every_sample_is_refused(wrong):
    loader = loader_for(RaggedWithDims([4, 5, 6, 7]), order=lambda epoch: wrong)
    with pytest.raises(DataError, match="expected each of 0 to 3 once"):
        list(loader)


def test_padding_that_costs_is_told_once_with_buckets_that_leave_less(caplog):
    lengths = [4] * 10 + [8] * 10 + [16]
    loader = loader_for(RaggedWithDims(lengths))
    for _ in range(2):
        list(loader)
    (told,) = [r.getMessage() for r in caplog.records if "padding" in r.getMessage()]
    # 8 is padded to 16: 80 of 136 + 80 tokens. With 4, 8 and 16 nothing is.
    assert told.startswith("epoch 0: got padding of 37.0% of the tokens that ran in 3 buckets; ")
    assert "3 others would leave 0.0%: {'seq': 4}, {'seq': 8}, {'seq': 16}; 3 would leave" in told


def of_any_length(settings, **options):
    return replace(compiled_for(world(1), settings), least=2, **options)


def test_a_micro_batch_is_as_long_as_its_longest_sample_unless_it_is_to_be_its_buckets():
    data, compiled = RaggedWithDims([5, 6, 12, 1]), of_any_length({7: (1, 2), 16: (1, 1)})

    def lengths(**options):
        (step,) = DataLoader(
            data, compiled, tokens_per_step=99, pad=PAD, lookahead=0, shuffle=False, **options
        )
        return sorted(mb.inputs["labels"].shape[1] for mb in step.micro_batches)

    assert lengths() == [5, 6, 12]
    assert lengths(pad_to_multiple_of=4) == [7, 7, 12]
    assert lengths(pad_to="bucket") == [7, 7, 16]
    assert lengths(mode="inter") == [5, 6, 12]


def test_padding_of_samples_that_share_a_micro_batch_is_told_apart(caplog):
    data, compiled = RaggedWithDims([10, 16] * 4), of_any_length({16: (1, 2)})
    list(DataLoader(data, compiled, samples_per_step=2, pad=PAD, lookahead=0, shuffle=False))
    (told,) = [r.getMessage() for r in caplog.records if "padding" in r.getMessage()]
    said = "got padding of 18.8% of the tokens that ran, 0.0% if each sample ran by itself"
    assert said in told
    assert "steps of more samples" in told


def test_a_size_that_its_dim_cannot_have_is_told_as_that():
    halves = Buckets({"frames": "float32[batch, time*2]", "ids": "int64[batch, text]"},
                     [{"time": 4, "text": 3}])  # fmt: skip
    samples = Samples([{"frames": torch.zeros(5), "ids": torch.zeros(3).long()}], halves, None)
    with pytest.raises(DataError, match=r"got 5 for dim 'time\*2'.* expected a size that 'time"):
        samples.fit(0)


def test_the_buckets_that_there_are_are_not_told_as_better_ones():
    counts = Counter((("seq", length),) for length in (8, 16, 3, 11, 7, 16, 8, 5))
    every = [Bucket.of({"seq": size}) for size in (8, 16)]
    assert padding_advice(0.16, every, counts) == ""  # multiples of 8 leave as much
    told = padding_advice(0.5, every, counts)
    assert "2 others would leave 15.9%: {'seq': 8}, {'seq': 16}; 2 would leave 15.9%" in told


def test_little_padding_is_not_told(caplog):
    list(loader_for(RaggedWithDims([4, 7, 16] * 4 + [3])))
    assert not [r for r in caplog.records if "padding" in r.getMessage()]
