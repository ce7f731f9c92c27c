"""Streams: the steps of samples by number, exact resumes, workers, and what is refused."""

import io
import json
import logging
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

import dcpc
from dcpc.errors import DataError
from dcpc.runtime.data.loader import DataLoader
from dcpc.runtime.data.reading.stream_parts import EVERY
from dcpc.runtime.groups.groups import Groups
from tests.cases.fakes import FakeCompiled, compiled_for, plan_for, token_buckets
from tests.cases.streams import PAD, ByNumber, Divided, Plain, Stateful, Vague, sample, trained

SETTINGS = {4: (1, 3), 7: (1, 2), 16: (1, 2)}
COUNT = 210


def loader_for(dataset: Any, world: int = 1, **options: Any) -> DataLoader:
    groups = Groups(world, 0, global_ranks=tuple(range(world)))
    options = {"tokens_per_step": 60, "pad": PAD, "lookahead": 0, "window": 16, **options}
    return DataLoader(dataset, compiled_for(groups, SETTINGS), **options)


def of_datasets(count: int, shards: int = 3) -> Any:
    columns = [{n: x.tolist() for n, x in sample(i).items()} for i in range(count)]
    return Dataset.from_list(columns).to_iterable_dataset(num_shards=shards).with_format("torch")


def same(ours: list[Any], theirs: list[Any]) -> bool:
    """Whether steps have the same plans and tensors."""
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.plan, a.tokens, a.total_weight) == (b.plan, b.tokens, b.total_weight)
        for x, y in zip(a.micro_batches, b.micro_batches, strict=True):
            assert (x.samples, x.weight) == (y.samples, y.weight)
            assert all(torch.equal(v, y.inputs[n]) for n, v in x.inputs.items())
    return True


@pytest.mark.parametrize("make", [Plain, Divided, Stateful, of_datasets])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lookahead": 2, "samples_per_step": 7, "tokens_per_step": None},
        {"mode": "intra", "weight": "labels"},
        {"min_grad_accumulation_steps": 3, "max_grad_accumulation_steps": 4, "window": 0},
    ],
)
def test_a_stream_has_the_steps_of_the_same_samples_by_number(make, options):
    streamed = loader_for(make(40), **options)
    for _ in range(2):
        assert same(list(streamed), list(loader_for(ByNumber(40), shuffle=False, **options)))


def rest_of(state: Any, make: Any, world: int, **options: Any) -> tuple[list[int], Any]:
    dataset = make(COUNT)
    loader = loader_for(dataset, world, **options)
    loader.load_state_dict(state)
    return planned(list(loader)), dataset


def planned(steps: list[Any]) -> list[int]:
    return [i for step in steps for mb in step.plan.micro_batches for i in mb.sample_ids]


def saved(state: Any) -> Any:
    """A state as a checkpoint gives it back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("stop", [1, 10, 19])
@pytest.mark.parametrize("make", [Plain, Stateful, of_datasets])
def test_a_stream_goes_on_within_a_shard_at_any_world_size(make, stop):
    loader = loader_for(make(COUNT), 2, lookahead=2)
    steps = list(islice(loader, stop))
    first, state = trained_by(steps), saved(loader.state_dict())
    assert state["ahead"], "some samples of the window wait"
    for world in (1, 3):
        again, dataset = rest_of(state, make, world)
        assert sorted([*planned(steps), *again]) == list(range(COUNT))
        assert first == sorted(set(range(COUNT)) - {*again})
        if make is Stateful:
            behind = max(0, state["consumed"] - 1) // EVERY * EVERY
            assert len(dataset.yielded) == COUNT - behind


def trained_by(steps: list[Any]) -> list[int]:
    return sorted(planned(steps))


def test_the_state_of_the_last_step_is_the_next_epoch():
    loader = loader_for(Divided(9, step=1000))
    for _ in loader:
        state = loader.state_dict()
    assert (state["epoch"], state["consumed"], state["source"]) == (1, 0, None)
    again = loader_for(Divided(9, step=1000))
    again.load_state_dict(json.loads(json.dumps(state)))
    assert sorted(trained(list(again))) == list(range(1000, 1009))


@pytest.mark.parametrize("make", [Plain, Stateful])
def test_an_epoch_left_early_starts_afresh(make):
    loader = loader_for(make(40), lookahead=2)
    next(iter(loader))
    assert sorted(planned(list(loader))) == list(range(40))


def test_a_state_that_is_not_exact_is_noticed_and_the_stream_is_read_again(caplog):
    loader = loader_for(Vague(COUNT))
    steps = list(islice(loader, 12))
    with caplog.at_level(logging.WARNING, "dcpc"):
        rest, dataset = rest_of(loader.state_dict(), Vague, 1)
    assert sorted([*planned(steps), *rest]) == list(range(COUNT))
    assert "another sample after load_state_dict" in caplog.text
    assert len(dataset.yielded) > COUNT
    shuffled = of_datasets(COUNT).shuffle(seed=1, buffer_size=8)
    loader = loader_for(shuffled)
    before = trained(list(islice(loader, 12)))
    again = loader_for(shuffled)
    again.load_state_dict(loader.state_dict())
    assert sorted([*before, *trained(list(again))]) == list(range(COUNT))


@pytest.mark.parametrize("make", [Divided, Stateful])
def test_workers_read_a_stream_in_an_order_that_is_theirs(make):
    loader = loader_for(make(COUNT), lookahead=1, num_workers=2)
    steps = list(loader)
    assert same(steps, list(loader_for(ByNumber(COUNT), shuffle=False)))
    loader.set_epoch(0)
    begun = iter(loader)
    first = list(islice(begun, 10))
    state = saved(loader.state_dict())
    begun.close()
    assert same(first, steps[:10])
    again = loader_for(make(COUNT), num_workers=2)
    again.load_state_dict(state)
    assert sorted([*planned(first), *planned(list(again))]) == list(range(COUNT))
    with pytest.raises(DataError, match=r"read by 2 workers; expected 1, by which"):
        loader_for(make(COUNT)).load_state_dict(state)


def test_shards_of_datasets_that_end_at_other_places_are_read_by_workers():
    whole = sorted(trained(list(loader_for(of_datasets(20, shards=3), num_workers=2))))
    assert whole == list(range(20))


class Failing(Plain):
    def __iter__(self):
        yield from islice(super().__iter__(), 3)
        raise OSError("the shard is gone")


class Odd(Plain):
    def __iter__(self):
        yield {"input_ids": torch.ones(4).long(), "text": "a"}


class Once:
    """A file that is read once."""

    def __init__(self, count):
        self.lines = iter(map(sample, range(count)))

    def __iter__(self):
        return self.lines


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: Plain(0), {}, "got a stream without a sample in epoch 0; expected at least 1"),
        (lambda: Odd(1), {}, "sample 0: got input_ids, text; expected a mapping with exactly"),
        (lambda: Failing(9), {}, "sample 3 of the stream: got OSError: the shard is gone"),
        (lambda: Failing(9), {"num_workers": 1, "lookahead": 1}, "sample 3 of the stream: got OSE"),
        (lambda: Plain(9), {"num_workers": 2}, "got the same first sample from every worker"),
        (lambda: Plain(9), {"shuffle": True}, "shuffle=True: got it for a stream"),
        (lambda: Plain(9), {"order": list}, "order=: got it for a stream"),
        (lambda: ByNumber(9), {"num_workers": 2}, "num_workers=2: got it for samples by number"),
        (lambda: iter(ByNumber(9)), {}, "dataset: got iterator; expected samples by number .*str"),
    ],
)
def test_what_a_stream_cannot_do_is_named(make, options, message):
    with pytest.raises(DataError, match=message):
        list(loader_for(make(), **options))


def test_a_stream_that_is_read_once_has_no_second_epoch():
    loader = loader_for(Once(5))
    assert len(trained(list(loader))) == 5
    with pytest.raises(DataError, match=r"without a sample in epoch 1.*begins anew in each epoch"):
        list(loader)


def test_what_needs_the_length_of_a_stream_is_refused():
    loader = loader_for(Plain(9))
    with pytest.raises(DataError, match="count_steps: got a stream, whose number of samples"):
        loader.count_steps(0)
    with pytest.raises(TypeError, match=r"len\(loader\): got a stream, whose number of samples"):
        len(loader)
    state = loader_for(ByNumber(9)).state_dict()
    with pytest.raises(DataError, match=r"loader state: got fields epoch.*expected .*source"):
        loader.load_state_dict(state)


def test_data_that_became_shorter_or_other_is_noticed(caplog):
    loader = loader_for(Plain(COUNT))
    list(islice(loader, 12))
    short = loader_for(Plain(50))
    short.load_state_dict(loader.state_dict())
    with pytest.raises(DataError, match=r"ends after 50 samples; expected at least 65"):
        list(short)

    class Other(Plain):
        def __iter__(self):
            yield from (sample(i + 1) for i in range(self.count))

    other = loader_for(Other(COUNT))
    other.load_state_dict(loader.state_dict())
    with pytest.raises(DataError, match=r"first sample is input_ids \(2,\).*expected .*\(4,\)"):
        list(other)


def test_a_rank_holds_no_more_than_the_window():
    """Of an endless stream nothing stays but the samples that wait."""
    loader = loader_for(Plain(10**9), window=16)
    state = loader.state_dict()
    for _ in islice(loader, 30):
        assert len(loader._maker.samples._loaded) <= 16 + 1
        state = max(state, loader.state_dict(), key=lambda s: len(s["ahead"]))
    assert len(state["ahead"]) > 1
    again = loader_for(Plain(10**9), window=16)
    again.load_state_dict(state)
    for _ in islice(again, 5):
        assert len(again._stream._held) <= 1, "what was trained is dropped"


class Training(FakeCompiled):
    """Keeps the samples of its steps as text."""

    def train_step(self, step: Any) -> None:
        for mb in step.micro_batches:
            for row, labels in zip(*(mb.inputs[n] for n in PAD), strict=True):
                told = [int(row[0]), *labels[labels != -100].tolist()]
                self.texts.append(bytes(told).decode())


def test_the_example_of_the_guide_reads_files_as_a_stream(tmp_path, monkeypatch):
    lines = [f"{n} {'long ' * (n % 5)}line" for n in range(20)]
    (tmp_path / "corpus").mkdir()
    for k in range(2):
        (tmp_path / f"corpus/{k}.txt").write_text("\n\n".join(lines[k::2]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    guide = (Path(__file__).parents[3] / "docs/streams.md").read_text()
    code = guide.split("```python\n")[1].split("```")[0]
    buckets = token_buckets(32)
    compiled = Training(buckets, {b: plan_for(b, 1, 4) for b in buckets}, Groups())
    compiled.texts = []
    exec(code, {"dcpc": dcpc, "compiled": compiled, "pad": PAD, "steps": 5})
    assert sorted(compiled.texts) == sorted(lines)
