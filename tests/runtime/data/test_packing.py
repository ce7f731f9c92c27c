"""Rows of several sequences: how they are filled, what they hold, and what is refused."""

import json
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpc.buckets import Bucket, Buckets
from dcpc.commands.replay import replay
from dcpc.errors import DataError
from dcpc.ir import Packable
from dcpc.runtime.data import cuts
from dcpc.runtime.data.loader import DataLoader
from dcpc.runtime.data.packing import fill_rows, pack
from dcpc.runtime.data.weights import CountLabels
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.planner.own_lengths import OwnLengths
from dcpc.runtime.planner.plan_file import PlanFile
from dcpc.runtime.planner.step_planner import plan_rows
from tests.cases.fakes import FakeCompiled, RaggedWithDims, plan_for

LENGTHS_FILE = Path(__file__).parents[4] / "shared" / "data" / "lengths" / "wikipedia_192k_03.json"
SETTINGS = {4: (1, 3), 16: (1, 2), 32: (1, 1)}
PACKABLE = Packable(("position_ids",), {"input_ids": 0, "labels": 1}, by_positions=True)
LENGTHS = [4, 2, 16, 7, 5, 1, 30, 12, 4, 4, 3, 7, 9, 2, 2, 1, 11]


@dataclass
class FakePacked(FakeCompiled):
    packable: Packable = field(default=PACKABLE)

    def own_lengths(self, multiple: int | None) -> OwnLengths:
        def seconds_at(bucket, row, sizes, count):
            return 1e-6 * count * sizes["seq"] / row.sp

        return OwnLengths(lambda b, s: True, seconds_at, lambda b: {"seq": 1}, multiple or 1)


def compiled(names=("input_ids", "position_ids", "labels"), packable=PACKABLE, world=2):
    buckets = Buckets(
        inputs=dict.fromkeys(names, "int64[batch, seq]"), sizes=[{"seq": n} for n in SETTINGS]
    )
    plans = {b: plan_for(b, *SETTINGS[b["seq"]]) for b in buckets}
    groups = Groups(world, 0, global_ranks=tuple(range(world)))
    return FakePacked(buckets, plans, groups, packable=packable)


def loader_for(lengths=LENGTHS, made=None, **options) -> DataLoader:
    options = {
        "tokens_per_step": 50, "lookahead": 0, "packing": True, "weight": "labels",
        "pad_to": "bucket", **options,
    }  # fmt: skip
    return DataLoader(RaggedWithDims(lengths), made or compiled(), **options)


def trained(step) -> list[int]:
    return [i for mb in step.plan.micro_batches for i in mb.sample_ids]


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), max_size=60), st.integers(20, 40))
def test_rows_hold_every_sequence_once_and_are_not_overfull(lengths, size):
    numbered = list(enumerate(lengths))
    rows = fill_rows(numbered, dict.fromkeys(range(len(lengths)), size))
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    totals = [sum(lengths[i] for i in row) for row in rows]
    assert all(total <= size for total in totals)
    # What is left after a row has been filled did not fit into what it left empty.
    for k, (row, total) in enumerate(zip(rows, totals, strict=True)):
        later = [lengths[i] for other in rows[k + 1 :] for i in other]
        assert all(n > size - total for n in later), (row, total)


def test_rows_of_many_short_sequences_pad_nothing_but_the_last():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(5, 90, (400,), generator=generator).tolist()
    rows = fill_rows(list(enumerate(lengths)), dict.fromkeys(range(400), 512))
    totals = [sum(lengths[i] for i in row) for row in rows]
    assert totals[:-1] == [512] * (len(rows) - 1)


def test_a_longer_row_is_taken_where_it_takes_less():
    buckets = [Bucket.of({"seq": n}) for n in (10, 30)]
    samples = [(i, buckets[0]) for i in range(9)]  # of 6: one in a row of 10, five in one of 30

    def rows(long_s):
        seconds = {10: 1.0, 30: long_s}
        return pack(samples, lambda i: 6, buckets, lambda b: seconds[b["seq"]]).buckets

    assert [b["seq"] for b in rows(4.0)] == [30, 30]
    assert [b["seq"] for b in rows(10.0)] == [10] * 9
    kept = pack(samples, lambda i: 6, buckets, lambda b: 1.0, one_bucket=True)
    assert [b["seq"] for b in kept.buckets] == [10] * 9


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(1, 32), min_size=1, max_size=40),
    st.integers(1, 100),
    st.sampled_from(["auto", "inter", "intra"]),
    st.sampled_from([0, 8, 256]),
)
def test_epoch_has_every_sample_once(lengths, tokens, mode, window):
    steps = list(loader_for(lengths, tokens_per_step=tokens, mode=mode, window=window))
    assert sorted(i for step in steps for i in trained(step)) == list(range(len(lengths)))
    for step in steps:
        own = sum(lengths[i] for i in trained(step))
        assert step.tokens == own
        assert own <= tokens or step.samples == 1
        assert step.samples == len(trained(step))
        for mb in step.plan.micro_batches:
            assert mb.sample_ids == tuple(i for row in mb.rows for i in row)
            assert all(sum(lengths[i] for i in row) <= mb.bucket["seq"] for row in mb.rows)
        if mode == "intra":
            assert len({mb.bucket for mb in step.plan.micro_batches}) == 1


@pytest.mark.parametrize(
    ("world", "lookahead", "mode", "goes_on"),
    [(1, 1, "evolve", True), (1, 0, "evolve", False), (2, 1, "evolve", False),
     (1, 1, "auto", False)],
)  # fmt: skip
def test_evolve_goes_on_where_a_step_runs_meanwhile_and_one_rank_plans(
    world, lookahead, mode, goes_on, monkeypatch
):
    clock, turned = count(), []

    def plan_counting(*given):
        *others, turns = given
        turned.append(list(turns))
        return plan_rows(*others, turned[-1])

    monkeypatch.setattr(cuts, "time", SimpleNamespace(perf_counter=lambda: 1e-6 * next(clock)))
    monkeypatch.setattr(cuts, "plan_rows", plan_counting)
    made = loader_for(made=compiled(world=world), mode=mode, lookahead=lookahead)
    steps = list(made)
    assert sorted(i for step in steps for i in trained(step)) == list(range(len(LENGTHS)))
    assert any(turned) is goes_on
    assert len(turned) <= 2 * len(steps) - 1  # the first has no step before it


def test_state_resumes_in_the_middle_at_another_world_size_and_without_packing():
    expected = [sorted(trained(s)) for s in loader_for(seed=3)]
    loader = loader_for(seed=3)
    for _, _step in zip(range(2), loader, strict=False):
        state = json.loads(json.dumps(loader.state_dict()))
    again = loader_for(made=compiled(world=4))
    again.load_state_dict(state)
    assert [sorted(trained(s)) for s in again] == expected[2:]


def test_rows_begin_anew_with_each_sequence_and_end_in_one_of_padding():
    (step,) = loader_for([5, 3, 6], made=compiled(world=1), shuffle=False)
    (mb,) = step.micro_batches
    data = RaggedWithDims([5, 3, 6])
    assert step.rows == ((2, 0, 1),)
    assert mb.samples == (2, 0, 1)
    (planned,) = step.plan.micro_batches
    assert (planned.sample_ids, planned.rows, planned.batch) == ((2, 0, 1), step.rows, 1)
    assert mb.rows == step.rows
    x = {name: value[0] for name, value in mb.inputs.items()}
    ids = torch.cat([data[i]["input_ids"] for i in (2, 0, 1)])
    assert torch.equal(x["input_ids"][:14], ids)
    assert x["input_ids"][14:].tolist() == [0, 0]
    assert x["position_ids"].tolist() == [*range(6), *range(5), *range(3), 0, 1]
    labels = torch.cat([data[i]["labels"] for i in (2, 0, 1)])
    labels[[0, 6, 11]] = -100  # the model predicts each label from the token before it
    assert torch.equal(x["labels"][:14], labels)
    assert x["labels"][14:].tolist() == [-100, -100]
    assert mb.weight == float((labels != -100).sum())


def test_a_label_is_kept_where_the_model_does_not_shift_and_padding_has_a_number_of_its_own():
    names = ("input_ids", "segment_ids", "position_ids", "labels")
    numbered = Packable(("segment_ids",), {}, by_numbers=True)
    made = compiled(names, numbered, world=1)
    (step,) = loader_for([5, 6], made, packing="segment_ids", shuffle=False)
    (mb,) = step.micro_batches
    assert mb.inputs["segment_ids"][0].tolist() == [1] * 6 + [2] * 5 + [3] * 5
    assert mb.inputs["position_ids"][0].tolist() == [*range(6), *range(5), *range(5)]
    labels = torch.cat([RaggedWithDims([5, 6])[i]["labels"] for i in (1, 0)])
    assert torch.equal(mb.inputs["labels"][0, :11], labels)


def test_tokens_and_padding_are_counted():
    loader = loader_for()
    steps = list(loader)
    sizes = [mb.batch * mb.bucket["seq"] for s in steps for mb in s.plan.micro_batches]
    stats = loader.stats()
    assert (stats.tokens, stats.padding) == (sum(LENGTHS), sum(sizes) - sum(LENGTHS))
    unpacked = compiled(("input_ids", "labels"))
    alone = loader_for(made=unpacked, packing=False, pad={"input_ids": 0, "labels": -100})
    list(alone)
    assert alone.stats().padding > 2 * stats.padding


REFUSED = [
    ({"weight": "samples"}, "got weight='samples'; expected what the loss is a mean over"),
    ({"packing": "documents"}, "got inputs input_ids, position_ids, labels; expected one named 'd"),
    ({"made": compiled(("input_ids", "labels"))}, "expected one named 'position_ids'"),
    ({"made": compiled(packable=replace(PACKABLE, reason="node conv joins positions"))},
     "would mix the sequences of a row: node conv joins positions"),
    ({"made": compiled(packable=replace(PACKABLE, marks=("input_ids",)))},
     "by input_ids, which the loader does not make"),
    ({"made": compiled(packable=replace(PACKABLE, by_positions=False, by_numbers=True))},
     "position_ids with positions that restart would not keep them apart"),
    ({"weight": lambda inputs: 1.0}, "does not use the first 1 of a row"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_would_be_wrong_is_refused(options, message):
    with pytest.raises(DataError, match=message):
        loader_for(**options)


@dataclass
class Launching(FakePacked):
    """A micro-batch costs as much as 20 tokens before its first one."""

    def own_lengths(self, multiple: int | None) -> OwnLengths:
        def seconds_at(bucket, row, sizes, count):
            return 1e-6 * (20 + count * sizes["seq"] / row.sp)

        return OwnLengths(lambda b, s: True, seconds_at, lambda b: {"seq": 1}, multiple or 1)


def test_auto_packs_the_steps_that_gain_by_it_and_tells_of_the_others(caplog):
    caplog.set_level("INFO", "dcpc")
    plain = compiled(world=1)
    made = Launching(plain.buckets, plain.plans, plain.groups, packable=PACKABLE)
    found = [[s.rows for s in loader_for(made=made, packing=p)] for p in ("auto", True)]
    assert found[0] == found[1]
    assert not caplog.records
    # Two of 30 tokens fit in no row: there is nothing to gain.
    steps = list(loader_for([30, 30, 9, 9, 9], made, packing="auto", tokens_per_step=60, window=0,
                            shuffle=False))  # fmt: skip
    assert [sorted(step.rows) for step in steps] == [[(0,), (1,)], [(2, 3, 4)]]
    assert [r.args[0] for r in caplog.records] == [0]
    assert "step 0 has one sample a row" in caplog.text


@pytest.mark.parametrize(
    "options",
    [
        {"packing": True}, {"packing": True, "pad_to": "longest"}, {"packing": "auto"},
        {"packing": True, "mode": "intra"},
    ],
)  # fmt: skip
def test_a_saved_step_of_packed_rows_is_planned_again(options, tmp_path):
    step = next(iter(loader := loader_for(**options)))
    loader.save_plan(step, tmp_path / "step.json")
    recorded = PlanFile.read(tmp_path / "step.json")
    assert recorded.plan.packed(step.rows).micro_batches == step.plan.micro_batches
    assert "planned again: the same\n" in replay(recorded)
    if recorded.rows:  # else no row has several
        swapped = replace(recorded, rows=(*recorded.rows[1:], recorded.rows[0]))
        assert "planned again: the same\n" not in replay(swapped)


@pytest.mark.parametrize(("options", "reason"), [
    ({"made": compiled(("input_ids", "labels"))}, "expected one named 'position_ids'"),
    ({"weight": "samples"}, "got weight='samples'"),
    ({"made": compiled(packable=replace(PACKABLE, reason="node conv joins"))}, "node conv joins"),
])  # fmt: skip
def test_auto_trains_what_cannot_be_packed_without_and_says_why(options, reason, caplog):
    auto, plain = (loader_for(packing=p, lengths=[4, 4, 16], **options) for p in ("auto", False))
    assert auto.recipe.text() == plain.recipe.text()
    (told,) = [text for text in caplog.messages if "steps are not packed" in text]
    assert reason in told


def test_auto_takes_the_numbers_of_sequences_where_the_model_tells_them_apart_by_these():
    numbered = Packable(("segment_ids",), {}, by_numbers=True)
    made = compiled(("input_ids", "segment_ids", "labels"), numbered, world=1)
    (step,) = loader_for([5, 6], made, packing="auto", shuffle=False)
    assert all((mb.inputs["segment_ids"] > 0).all() for mb in step.micro_batches)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"input_ids": "int64[batch, seq+1]"}, r"'input_ids': got int64\[batch, seq\+1\]"),
        ({"kind": "int64[batch]"}, r"'kind': got int64\[batch\]; expected the dims 'batch' and"),
        ({"position_ids": "float32[batch, seq]"}, r"expected int64\[batch, seq\]"),
        ({"image": "float32[batch, seq, width]"}, "got buckets of seq, width; expected one named"),
    ],
)
def test_inputs_that_cannot_follow_each_other_are_refused(spec, message):
    names = dict.fromkeys(("input_ids", "position_ids", "labels"), "int64[batch, seq]")
    sizes = {"seq": 8, "width": 3} if "image" in spec else {"seq": 8}
    buckets = Buckets(inputs={**names, **spec}, sizes=[sizes])
    made = replace(compiled(), buckets=buckets)
    with pytest.raises(DataError, match=message):
        loader_for(made=made)


def test_labels_that_a_function_counts_need_a_value_that_does_not():
    pad = {"labels": -100, "input_ids": 0}
    loader = loader_for(weight=lambda inputs: 1.0, pad=pad)
    assert sorted(i for s in loader for i in trained(s)) == list(range(len(LENGTHS)))
    other = loader_for(weight=CountLabels("labels", ignore_index=-1))
    step = next(iter(other))
    assert all((mb.inputs["labels"][:, 0] == -1).all() for mb in step.micro_batches)


@pytest.mark.skipif(not LENGTHS_FILE.exists(), reason=f"{LENGTHS_FILE} is not there")
def test_real_lengths_leave_next_to_nothing_empty():
    """Documents of Wikipedia, up to buckets of powers of two; padded alone a third is empty."""
    lengths = json.loads(LENGTHS_FILE.read_text())["lens"]
    buckets = [Bucket.of({"seq": 2**k}) for k in range(9, 18)]
    own = [next(b for b in buckets if b["seq"] >= n) for n in lengths]
    found = pack(list(enumerate(own)), lengths.__getitem__, buckets, lambda b: float(b["seq"]))
    assert sorted(i for row in found.rows for i in row) == list(range(len(lengths)))
    tokens = sum(lengths)
    assert sum(b["seq"] for b in own) > 1.4 * tokens
    assert sum(b["seq"] for b in found.buckets) < 1.001 * tokens
