"""Batch norms in train(): `batch_norm="micro"` beside the plain model on the same micro-batches."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import dcpc
from dcpc.trace import statistics
from dcpc.trace.capture import capture
from tests.cases.asks import whole
from tests.cases.exactness import SPLITTING
from tests.cases.launch import run_prepared
from tests.cases.ready import Ready
from tests.cases.small_models import DIM, VOCABULARY, Tokens

INPUTS = {"ids": "int64[batch, seq]", "labels": "int64[batch, seq]"}
BUCKETS = dcpc.Buckets(INPUTS, [{"seq": 6}, {"seq": 12}])
PAD = {"ids": 0, "labels": -100}
LENGTHS = 5, 12, 6, 9, 11, 4, 12, 3
OPTIONS = {"backend": "eager", "verify": "off", "batch_norm": "micro"}
BESIDE = (
    {"sp": 1},
    {"parameters": "rounds", "sp": 1},
    {"parameters": "step", "recompute": "all", "sp": 1},
    {"parameters": "pull", "sp": 2},
    {"backend": "inductor", "sp": 2},
    {"recompute": "all", "sp": 2},
)


class Convolved(Tokens):
    """Norms around a convolution: without momentum, without weights, called twice, and never."""

    def setup(self):
        self.first = nn.BatchNorm1d(DIM)
        self.convolution = nn.Conv1d(DIM, DIM, 3, padding=1, groups=2)
        self.mean = nn.BatchNorm1d(DIM, momentum=None)
        self.twice = nn.BatchNorm1d(DIM, affine=False, momentum=0.3)
        self.idle = nn.BatchNorm1d(DIM, affine=False)

    def mix(self, x):
        x = self.first(x.mT)
        x = self.twice(self.mean(self.convolution(F.gelu(x))))
        return self.twice(torch.tanh(x)).mT


class Normed(Tokens):
    """One norm, and nothing else that reads another position."""

    def setup(self):
        self.norm = nn.BatchNorm1d(DIM)

    def mix(self, x):
        return self.norm(x.mT).mT


class Pictures(nn.Module):
    """A small convolutional net of pictures of two sizes."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8),
        )  # fmt: skip
        self.head = nn.Linear(8, 5)

    def forward(self, image, label):
        return F.cross_entropy(self.head(self.body(image).relu().mean((2, 3))), label)


def made(kind=Convolved):
    torch.manual_seed(0)
    return kind().double()


def compiled_of(model, **options):
    return dcpc.compile(model, BUCKETS, **OPTIONS | options)


def data(seq, batch, seed=0):
    ids, labels = torch.randint(
        0, VOCABULARY, (2, batch, seq), generator=torch.Generator().manual_seed(seed)
    )
    return {"ids": ids, "labels": labels}


def far(a, b):
    return float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-3))


def apart(model, plain):
    """Largest difference of gradients and buffers."""
    every = zip(model.parameters(), plain.parameters(), strict=True)
    pairs = [(p.grad, q.grad) for p, q in every if q.grad is not None]
    return max(far(a, b) for a, b in [*pairs, *zip(model.buffers(), plain.buffers(), strict=True)])


def calls_error(model, plain, compiled, batches):
    worst = 0.0
    for batch in batches:
        loss, expected = compiled(**batch), plain(**batch)
        loss.backward(), expected.backward()
        worst = max(worst, far(loss, expected), apart(model, plain))
    return worst


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_calls_are_the_plain_models(backend):
    model = made()
    plain, compiled = copy.deepcopy(model), compiled_of(model, backend=backend)
    batches = [data(seq, batch, seq) for seq, batch in ((6, 2), (12, 1), (9, 2), (12, 2))]
    assert calls_error(model, plain, compiled, batches) < 1e-10
    model.eval(), plain.eval()
    assert far(compiled(**batches[0]), plain(**batches[0])) < 1e-10


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_pictures_are_the_plain_models(backend):
    model = made(Pictures)
    specs = {"image": "float64[batch, 3, height, width]", "label": "int64[batch]"}
    buckets = dcpc.Buckets(specs, [{"height": 8, "width": 8}, {"height": 8, "width": 12}])
    plain = copy.deepcopy(model)
    compiled = dcpc.compile(model, buckets, backend=backend, batch_norm="micro")
    batches = [
        {"image": torch.randn(n, 3, 8, w).double(), "label": torch.arange(n)}
        for n, w in ((2, 8), (1, 12), (2, 12))
    ]
    assert calls_error(model, plain, compiled, batches) < 1e-10


# ------------------------------------------------------------------------------------------ steps


class Texts:
    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, i):
        return {n: x[0] for n, x in data(LENGTHS[i], 1, i).items()}


def loader_of(compiled, **options):
    options = {"pad": PAD, "weight": "labels", "loss_depends_on": "padding"} | options
    return dcpc.DataLoader(Texts(), compiled, tokens_per_step=40, **options)


def plain_step(plain, step):
    """Loss of a step of the plain model, which runs this rank's micro-batches in their order."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    weights = [mb.weight / len(mb.ranks) for mb in step.micro_batches]
    total = torch.tensor([sum(weights), 0.0], dtype=torch.float64)
    if world > 1:
        dist.all_reduce(total)
    samples = 0.0
    for mb, weight in zip(step.micro_batches, weights, strict=True):
        loss = plain(**mb.inputs) * (weight / total[0])
        loss.backward()
        total[1] += loss.detach()
        samples += len(mb.samples) / len(mb.ranks)
    if world > 1:
        for p in plain.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
        every = torch.tensor([samples, float(total[1])], dtype=torch.float64)
        dist.all_reduce(every)
        total[1] = every[1]
        for b in plain.buffers():
            if b.is_floating_point():
                b.mul_(samples / every[0])
                dist.all_reduce(b)
            else:
                dist.all_reduce(b, dist.ReduceOp.MAX)
    return total[1]


def prepared(options):
    return Ready(made(), BUCKETS, 2, device=SPLITTING, **OPTIONS | options)


def steps_error(rank, ready):
    model = ready.model
    plain, compiled = copy.deepcopy(model), ready.compile()
    worst = 0.0
    for step in loader_of(compiled):
        result = compiled.train_step(step, outputs=ready.options.get("recompute") == "all")
        worst = max(worst, far(result.loss, plain_step(plain, step)))
        held = [*zip(model.buffers(), plain.buffers(), strict=True)]
        for (_, p), q in zip(compiled.named_parameters(), plain.parameters(), strict=True):
            held.append((whole(p.grad), q.grad))
            p.grad = q.grad = None
        worst = max(worst, *(far(a, b) for a, b in held))
    return worst, [b.tolist() for b in model.buffers()]


def calls_of_ranks(rank, ready):
    """Buffers after one call on rank 0 and two on rank 1, then after their average."""
    model, compiled = ready.model, ready.compile()
    for seed in range(rank + 1):
        compiled(**data(6, 2, 10 * rank + seed)).backward()
    alone = [b.double().tolist() for b in model.buffers()]
    compiled.reduce_gradients()
    return alone, [b.double().tolist() for b in model.buffers()]


@pytest.mark.parametrize(
    "options",
    [{"sp": 2}, *(pytest.param(each, marks=pytest.mark.slow) for each in BESIDE)],
    ids=str,
)
def test_statistics_of_steps_are_averaged_over_ranks(options):
    (worst, first), (other, second) = run_prepared(prepared, steps_error, 2, options)
    assert max(worst, other) < 1e-10
    assert first == second


def test_calls_by_hand_are_averaged_where_gradients_are_summed():
    (one, first), (two, second) = run_prepared(prepared, calls_of_ranks, 2, {"sp": 1})
    assert first == second
    for a, b, mean in zip(one, two, first, strict=True):
        a, b, mean = map(torch.tensor, (a, b, mean))
        expected = torch.maximum(a, b) if a.dim() == 0 else (a + 2 * b) / 3
        assert torch.allclose(mean, expected, atol=1e-6, rtol=0)


def test_steps_that_fail_leave_statistics_alone_and_checkpoints_hold_them(tmp_path):
    model = made()
    compiled = compiled_of(model)
    before = [b.clone() for b in model.buffers()]
    first, *_ = loader_of(compiled)
    with torch.no_grad():
        model.head.bias[0] = torch.inf
    assert compiled.train_step(first, nonfinite="skip").skipped
    with pytest.raises(dcpc.DataError, match="finite"):
        compiled.train_step(first)
    assert all(map(torch.equal, model.buffers(), before))
    with torch.no_grad():
        model.head.bias[0] = 0.0
    compiled.train_step(first)
    kept = [b.clone() for b in model.buffers()]
    assert not all(map(torch.equal, kept, before))
    compiled.save(tmp_path, step=1, wait=True)
    for b in model.buffers():
        b.zero_()
    compiled.load(tmp_path)
    assert all(map(torch.equal, model.buffers(), kept))


# ------------------------------------------------------------------------------ what is not trained


def test_verification_compares_statistics(monkeypatch):
    right = statistics.new_statistics

    def wrong(model):
        return tuple(x * 1.01 if x.is_floating_point() else x for x in right(model))

    monkeypatch.setattr(capture, "new_statistics", wrong)
    with pytest.raises(dcpc.VerifyError):
        compiled_of(made(Normed), verify="auto")


def test_refusals_name_the_way_out():
    model = made()
    with pytest.raises(dcpc.TraceError, match=r"batch_norm='micro'"):
        compiled_of(model, batch_norm="refuse")
    with pytest.raises(dcpc.PlanError, match=r"batch_norm='both'.*refuse, micro"):
        compiled_of(model, batch_norm="both")
    with pytest.raises(dcpc.TraceError, match=r"SyncBatchNorm in train\(\).*batch_norm='micro'"):
        compiled_of(nn.SyncBatchNorm.convert_sync_batchnorm(model))


def test_padding_in_statistics_is_asked_for():
    compiled = compiled_of(made(Normed), verify="auto")
    assert "padding included" in compiled.report()
    with pytest.raises(dcpc.DataError, match=r"batch norms.*over padding.*'padding'"):
        loader_of(compiled, loss_depends_on=())
    loader_of(compiled)
    with pytest.raises(dcpc.DataError, match="loss_depends_on='micro_batch'"):
        loader_of(compiled, weight="samples")


class Counting(Normed):
    """A buffer of its own beside a norm's."""

    def setup(self):
        super().setup()
        self.register_buffer("calls", torch.zeros(()))

    def mix(self, x):
        self.calls += 1
        return super().mix(x)


class Pooled(Normed):
    def mix(self, x):
        return x + self.norm(x.mean(1))[:, None]


def test_norms_of_lone_values_are_refused():
    with pytest.raises(dcpc.TraceError, match=r"\[batch, \d+\], over samples alone .*small_models"):
        compiled_of(made(Pooled))


def test_other_buffers_are_refused():
    with pytest.raises(dcpc.TraceError, match=r"changes 1 buffers \(calls\)"):
        compiled_of(made(Counting))
