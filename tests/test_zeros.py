"""Buckets in which a dim is 0 have a trace of their own: texts without images beside others."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dcpc
from dcpc.errors import BucketError, DataError, DispatchError
from dcpc.runtime.data.samples import Samples
from tests.cases.asks import trained
from tests.cases.exactness import compiled_error
from tests.cases.launch import run_prepared
from tests.cases.ready import Ready

INPUTS = {
    "input_ids": "int64[batch, seq]",
    "labels": "int64[batch, seq]",
    "pixel_values": "float64[batch, images, 3, 8, 8]",
}
SIZES = [{"seq": s, "images": n} for s, n in [(12, 0), (9, 4), (20, 0), (20, 1)]]
PAD = {"input_ids": 0, "labels": -100}


class TextAndImages(nn.Module):
    """A token for each image before a causal text; the tower is left out where there is none."""

    def __init__(self, branches: bool = True) -> None:
        super().__init__()
        self.branches = branches
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.tower = nn.Sequential(nn.Conv2d(3, 4, 4, stride=4), nn.GELU(), nn.Flatten())
        self.project, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.double()

    def forward(self, input_ids: Tensor, labels: Tensor, pixel_values: Tensor) -> Tensor:
        x, (batch, images) = self.embed(input_ids), pixel_values.shape[:2]
        if images > 0 or not self.branches:
            seen = self.project(self.tower(pixel_values.flatten(0, 1)))
            x = torch.cat([seen.unflatten(0, (batch, images)), x], 1)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = (x + self.out(mixed.transpose(1, 2).flatten(2)))[:, images:]
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def model(branches: bool = True) -> TextAndImages:
    torch.manual_seed(0)
    return TextAndImages(branches)


def ready(world: int = 1, branches: bool = True, **options) -> Ready:
    options = {"verify": "off", "memory": 1e6, "backend": "eager"} | options
    return Ready(model(branches), dcpc.Buckets(INPUTS, SIZES), world, **options)


def sample(seq: int, images: int, seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(100 * seed + seq)
    ids, labels = torch.randint(32, (2, seq), generator=draw)
    pixels = torch.randn(images, 3, 8, 8, dtype=torch.float64, generator=draw)
    return {"input_ids": ids, "labels": labels, "pixel_values": pixels}


def batch(seq: int, images: int, count: int) -> dict[str, Tensor]:
    every = [sample(seq, images, i) for i in range(count)]
    return {n: torch.stack([each[n] for each in every]) for n in INPUTS}


class Data:
    """Samples of some lengths; those without images lack the key, have None or no image."""

    def __init__(self, lengths) -> None:
        self.every = [sample(*own, i) for i, own in enumerate(lengths)]

    def __len__(self) -> int:
        return len(self.every)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        found = dict(self.every[i])
        if not len(found["pixel_values"]) and i % 3:
            found |= {"pixel_values": None}
            if i % 3 == 1:
                del found["pixel_values"]
        return found


MIXED = [(12, 0), (9, 4), (5, 0), (7, 4), (20, 0), (20, 1), (11, 0), (8, 4)] * 2
TEXTS = [(12, 0), (5, 0), (20, 0), (11, 0)]


def train(compiled: dcpc.CompiledModel, alone: nn.Module, lengths=MIXED) -> float:
    data = Data(lengths)
    loader = dcpc.DataLoader(
        data, compiled, samples_per_step=len(data) // 2, pad=PAD, weight="labels"
    )
    found = trained(compiled, loader, alone, data.every)
    assert len(found.samples) == len(data)
    return found.worst


@pytest.fixture(scope="module")
def compiled() -> dcpc.CompiledModel:
    return ready().compile()


@pytest.mark.parametrize("branches", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_texts_without_images_have_a_trace_that_is_right_and_verified(branches):
    compiled = ready(verify="auto", branches=branches).compile()
    texts, images, _ = compiled.planned.traces
    assert "gelu" not in texts.traced.program.gm.code
    assert "gelu" in images.traced.program.gm.code
    report = compiled.report()
    assert "trace 1: loss and every gradient at {images: 0, seq: " in report
    assert "{images: 0, seq: 20}" in report
    shapes = [(12, 0), (11, 0), (20, 0), (9, 4), (20, 1)]
    every = [batch(*own, count) for own in shapes for count in (1, 2)]
    assert max(compiled_error(compiled, compiled.model, each) for each in every) < 1e-12


def test_a_call_without_the_key_is_one_of_no_images(compiled):
    given = batch(11, 0, 2)
    expected = compiled.model(**given).item()
    for missing in ({}, {"pixel_values": None}):
        less = {n: given[n] for n in PAD} | missing
        assert compiled(**less).item() == pytest.approx(expected, rel=1e-12)
        assert compiled.evaluate(less).item() == pytest.approx(expected, rel=1e-12)
    with pytest.raises(DispatchError, match="missing: labels"):
        compiled(input_ids=given["input_ids"])


def test_steps_of_texts_and_images_are_the_plain_models(compiled):
    alone = model()
    assert train(compiled, alone) < 1e-10
    assert train(compiled, alone, TEXTS * 2) < 1e-10
    pad = {**PAD, "pixel_values": 0}  # so texts run at their own lengths
    (step,) = dcpc.DataLoader(Data(TEXTS), compiled, samples_per_step=4, pad=pad, weight="labels")
    compiled.zero_grad()
    compiled.train_step(step)
    assert all((p.grad is None) == n.startswith(("tower", "project"))
               for n, p in compiled.named_parameters())  # fmt: skip


def test_an_epoch_goes_on_after_texts_where_it_stood(compiled):
    def loader():
        return dcpc.DataLoader(Data(MIXED), compiled, samples_per_step=4, pad=PAD, weight="labels")

    def ids(steps):
        return [[mb.sample_ids for mb in step.plan.micro_batches] for step in steps]

    whole, first, again = ids(loader()), loader(), loader()
    next(iter(first))
    again.load_state_dict(first.state_dict())
    assert ids(again) == whole[1:]


def over_ranks(rank: int, made: Ready) -> list[float]:
    compiled, alone = made.compile(), model(made.model.branches)
    one_of_each = [(12, 0), (9, 4)] * 2
    return [train(compiled, alone, lengths) for lengths in (MIXED, TEXTS * 2, one_of_each)]


OPTIONS = [
    {"sp": 2, "recompute": "all"},
    {"sp": 1},
    {"parameters": "step"},
    {"parameters": "rounds", "branches": False},
    {"parameters": "rounds"},
    {"parameters": "rounds", "recompute": "all", "sp": 2, "verify": "auto"},
    {"pipeline": 2, "parameters": "step", "sp": 1, "memory": 1e7},
]


@pytest.mark.multirank
@pytest.mark.parametrize(
    "options", [OPTIONS[0], *(pytest.param(o, marks=pytest.mark.slow) for o in OPTIONS[1:])]
)
def test_ranks_of_texts_and_ranks_of_images_sum_to_the_plain_gradient(options):
    for found in run_prepared(partial(ready, 2, **options), over_ranks, 2):
        assert max(found) < 1e-10


def test_texts_are_padded_to_buckets_without_images():
    buckets = dcpc.Buckets(INPUTS, [{"seq": 30, "images": 0}, {"seq": 20, "images": 1}])
    samples = Samples(Data([(15, 0), (15, 1)]), buckets, {**PAD, "pixel_values": 0})
    assert samples.fit(0).bucket == buckets.buckets[0]
    assert samples.fit(1).bucket == buckets.buckets[1]
    assert samples.fit(0).tokens == 15


def test_buckets_of_lengths_keep_texts_apart():
    lengths = [{"seq": s, "images": n} for s, n in [(9, 0), (10, 0), (9, 1), (9, 3), (10, 4)]]
    found = dcpc.Buckets.from_lengths(INPUTS, lengths, count=3)
    assert sorted((b["seq"], b["images"]) for b in found) == [(9, 1), (10, 0), (10, 4)]


def test_no_images_are_refused_where_no_bucket_has_none():
    buckets = dcpc.Buckets(INPUTS, [{"seq": 20, "images": 1}])
    with pytest.raises(DataError, match=r"expected .*pixel_values"):
        Samples(Data([(15, 1), (15, 0)]), buckets, PAD).fit(1)
    shapes = {"input_ids": (1, 9), "labels": (1, 9), "pixel_values": (1, 0, 3, 8, 8)}
    with pytest.raises(DispatchError, match="an integer images >= 1"):
        buckets.match(shapes, {n: s.dtype for n, s in buckets.inputs.items()})


@pytest.mark.parametrize(
    ("spec", "sizes", "text"),
    [
        ("int64[batch, seq]", {"seq": 4, "batch": 0}, "dim 'batch' of input 'x' is 0"),
        ("int64[batch, seq-1]", {"seq": 0}, "dim 'seq-1' of input 'x' is -1"),
        ("int64[batch, seq-1]", {"seq": 1}, "dim 'seq-1' of input 'x' is 0"),
        ("int64[batch, seq]", {"seq": 0}, "got {seq: 0}, where all inputs are empty"),
    ],
)
def test_lengths_that_cannot_be_are_refused(spec, sizes, text):
    with pytest.raises(BucketError, match=text):
        dcpc.Buckets({"x": spec, "y": "int64[batch, seq]"}, [sizes])
