"""Overlap, clipping and shared-out parameters in steps of mixed degrees, against one device."""

import logging
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import dcpc
from dcpc.errors import DataError
from dcpc.runtime.parameters.modes import shares
from dcpc.runtime.step.gradients import clip_gradients
from tests.cases.documents import ROOT, blocks
from tests.cases.exactness import SPLITTING
from tests.cases.launch import run_prepared
from tests.cases.ragged import LENGTHS, Ragged, gpt
from tests.cases.ready import Ready, traced_once

DEGREES = {5: 2, 9: 1, 16: 1, 24: 4}
PAD = {"input_ids": 0, "labels": -100}
CLIP = 0.5
DOCS = ROOT / "docs"
# A larger eps than Adam's own: where a gradient is 0 but for rounding, 1e-8 makes steps of the
# rounding.
ADAM = {"lr": 1e-2, "eps": 1e-6}


BUCKETS = dcpc.Buckets(
    inputs=dict.fromkeys(("input_ids", "labels"), "int64[batch, seq]"),
    sizes=[{"seq": n, "batch": 2} for n in DEGREES],
)


def ready(world: int, mode: str = "whole") -> Ready:
    warnings.simplefilter("ignore")
    options = {"backend": "eager", "device": SPLITTING, "verify": "off", "parameters": mode}
    return Ready(gpt(layers=2), BUCKETS, world, **options)


def compiled_gpt(made: Ready) -> Any:
    compiled = made.compile()
    world = compiled.groups.world
    for bucket in BUCKETS:
        degree = min(DEGREES[bucket["seq"]], world)
        compiled.plans[bucket] = replace(compiled.plans[bucket], sp=degree)
    compiled.comm_bucket_bytes = 30_000  # of 231 kB: several buckets
    return compiled


def loader(compiled: Any, tokens: int = 120) -> dcpc.DataLoader:
    return dcpc.DataLoader(
        Ragged(),
        compiled,
        tokens_per_step=tokens,
        pad=PAD,
        weight="labels",
        shuffle=False,
        mode="inter",
    )


def one_device_loss(model: torch.nn.Module, step: Any) -> torch.Tensor:
    total, count = torch.zeros((), dtype=torch.float64), 0
    for i in sorted({i for mb in step.plan.micro_batches for i in mb.sample_ids}):
        x = Ragged()[i]
        logits = model.logits(x["input_ids"][None])[0]
        total = total + F.cross_entropy(logits, x["labels"], reduction="sum")
        count += int((x["labels"] != -100).sum())
    return total / count


def added_error(compiled: Any, steps: list[Any]) -> float:
    """Returns how far gradients of two steps in a row are from the sum of each step's own."""
    own = []
    for run in ([0], [1], [0, 1]):
        for p in compiled.parameters():
            p.grad = None
        for n in run:
            weight = compiled.train_step(steps[n]).total_weight
            samples = (i for mb in steps[n].plan.micro_batches for i in mb.sample_ids)
            assert weight == sum(int((Ragged()[i]["labels"] != -100).sum()) for i in samples)
        grads = (p.grad for p in compiled.parameters())
        own.append([getattr(g, "full_tensor", lambda g=g: g)().clone() for g in grads])
    return max(float((a + b - c).abs().max() / c.abs().max()) for a, b, c in zip(*own, strict=True))


def validation_error(compiled: Any, alone: Any) -> float:
    """Returns how far the loss of the loop in docs/train.md is from one device's."""
    (shown,) = (b.code for b in blocks((DOCS / "train.md").read_text()) if "def validate" in b.code)
    names: dict[str, Any] = {"dcpc": dcpc, "torch": torch}
    exec(shown, names)
    got = names["validate"](Ragged(), compiled, PAD)
    found, count = torch.zeros((), dtype=torch.float64), 0
    for x in map(Ragged().__getitem__, range(len(LENGTHS))):
        logits = alone.logits(x["input_ids"][None])[0].detach()
        found += F.cross_entropy(logits, x["labels"], reduction="sum")
        count += int((x["labels"] != -100).sum())
    return abs(got * count / float(found) - 1)


def parameter_error(model: Any, alone: torch.nn.Module) -> float:
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    pairs = [(getattr(p, "full_tensor", lambda p=p: p)(), q) for p, q in pairs]
    return max(float((p - q).abs().max() / q.abs().max()) for p, q in pairs)


def train(rank: int, made: Ready) -> dict[str, Any]:
    """Steps with clipping and Adam; after two of them its state is saved and loaded."""
    warnings.simplefilter("ignore")
    compiled, alone = compiled_gpt(made), gpt(layers=2)
    world = compiled.groups.world
    calls = []
    hooked = next(p for n, p in compiled.model.named_parameters() if n.endswith("ffn.down.weight"))
    hooked.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad is not None))
    optimizer = torch.optim.Adam(compiled.parameters(), **ADAM)
    plain = torch.optim.Adam(alone.parameters(), **ADAM)
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dcpc").addHandler(handler)
    logging.getLogger("dcpc").setLevel(logging.INFO)
    errors, early, norms, states = [], [], [], 0
    steps = [*loader(compiled), *loader(compiled)]
    for n, step in enumerate(steps):
        optimizer.zero_grad()
        result = compiled.train_step(step, clip=CLIP)
        early.append((result.early_bytes, result.reduced_bytes, len(step.micro_batches)))
        plain.zero_grad()
        one_device_loss(alone, step).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(alone.parameters(), CLIP))
        norms.append((result.grad_norm, norm, compiled.clip_grad_norm_(1e9), min(norm, CLIP)))
        optimizer.step()
        plain.step()
        errors.append(max(parameter_error(m, alone) for m in (compiled, compiled.model)))
        if n == 1 and world > 1:
            states = sum(
                s.numel()
                for state in optimizer.state.values()
                for s in (getattr(t, "to_local", lambda t=t: t)() for t in state.values())
                if s.ndim
            )
            saved = optimizer.state_dict()
            optimizer = torch.optim.Adam(compiled.parameters(), **ADAM)
            optimizer.load_state_dict(saved)
    stats = compiled.stats()
    assert sum(s.runs for s in stats.seconds.values()) == sum(len(s.micro_batches) for s in steps)
    assert all(s.measured_s > 0 for s in stats.seconds.values())
    predicted_s = [sum(s.plan.busy_s[r] for s in steps) for r in range(world)]
    assert stats.predicted_busy_s == pytest.approx(predicted_s)
    assert len(stats.busy_s) == len(stats.idle_s) == world
    assert stats.steps == len(steps)
    mine = sum(s.measured_s for s in stats.seconds.values())
    assert mine == pytest.approx(stats.busy_s[rank])
    return {
        "errors": errors,
        "early": early,
        "norms": norms,
        "states": states,
        "hook": calls,
        "own": sum(p.numel() for p in shares(compiled.model.parameters(), world)),
        "lines": [line for line in lines if line.startswith("step ")],
        "times": (stats.busy_s, stats.idle_s),
        "added": added_error(compiled, steps),
        "validated": validation_error(compiled, alone),
    }


def check(found: list[dict[str, Any]], mode: str) -> None:
    for rank, of in enumerate(found):
        assert len(of["errors"]) >= 3
        assert max(of["errors"]) < 1e-12
        assert of["added"] < 1e-10
        assert of["validated"] < 1e-10
        for ours, plain, again, clipped in of["norms"]:
            assert ours == pytest.approx(plain, rel=1e-12)
            assert again == pytest.approx(clipped, rel=1e-5)  # torch's 1e-6 beside the norm
        assert any(plain > CLIP for _, plain, _, _ in of["norms"])
        assert of["hook"]
        assert all(of["hook"])
        assert len(of["lines"]) == (len(of["errors"]) if rank == 0 else 0)
        # No overlap where a rank has nothing to run; else a good part of it, though the hooked
        # parameter, in the middle of the model, and the tied embedding wait for the end.
        for early, reduced, runs in of["early"]:
            assert 0 <= early < max(reduced, 1)
            # "step": a comm bucket leaves once the one before has arrived, which takes its time.
            waits = mode == "step" or runs == 0 or len(found) == 1
            assert waits or early > 0.4 * reduced


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("world", "mode"),
    [
        (2, "step"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((2, "whole"), (2, "pull"), (4, "step"))
        ),
    ],
)
def test_overlap_clipping_and_adam_equal_one_device(world, mode):
    found = run_prepared(ready, train, world, world, mode, timeout_s=280)
    check(found, mode)
    # Adam keeps two numbers for each of a rank's own elements: all of them once, over the ranks.
    elements = sum(p.numel() for p in gpt(layers=2).parameters())
    copies = world if mode == "whole" else 1
    assert sum(of["states"] for of in found) == copies * 2 * elements
    if mode != "whole":
        assert max(of["states"] for of in found) == 2 * found[0]["own"]
        assert found[0]["own"] < 1.02 * elements / world
    # What one rank measured of all is what all have.
    assert len({of["times"] for of in found}) == 1
    assert "imbalance" in found[0]["lines"][0]
    assert "early" in found[0]["lines"][0]


def test_the_same_script_alone():
    check([train(0, ready(1, "step"))], "step")


def test_a_planned_rank_keeps_its_share_of_the_state():
    buckets = dcpc.Buckets(
        inputs=dict.fromkeys(("input_ids", "labels"), "int64[batch, seq]"),
        sizes=[{"seq": 9, "batch": 1}],
    )
    model, options = gpt(layers=2), {"world": 4, "backend": "eager", "sp": 1}
    with traced_once():
        planned = {
            m: dcpc.api.plan(model, buckets, parameters=m, **options)
            for m in ("whole", "step", "pull")
        }
    kept = {m: p.request.resident_bytes for m, p in planned.items()}
    size = sum(p.nbytes for p in gpt(layers=2).parameters())
    share = sum(p.nbytes for p in shares(gpt(layers=2).parameters(), 4))
    assert share < 1.02 * size / 4
    # Comm buckets on their way are as large as all gradients of so small a model.
    assert kept["whole"] - kept["step"] == 2 * (size - share) - 2 * size
    buffers = kept["whole"] - 4 * size
    assert kept["pull"] == buffers + 5 * share
    # The last backward's gradients are all there at once, or each is added to the sum and freed.
    bucket = next(iter(buckets))
    peak = {m: p.plans[bucket].peak_bytes for m, p in planned.items()}
    assert peak["whole"] == peak["step"] > peak["pull"] + size / 3


@pytest.mark.parametrize("wrong", [0, -1.0, True, "1", float("nan")])
def test_a_largest_norm_that_is_none(wrong):
    with pytest.raises(DataError, match=r"largest norm of .*; expected a positive number"):
        clip_gradients(gpt(layers=2).parameters(), wrong)


def test_tensorboard_has_measured_beside_predicted(tmp_path):
    pytest.importorskip("tensorboard", reason="the package tensorboard is not installed")
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    compiled = compiled_gpt(ready(1))
    logger = dcpc.TensorBoardLogger(tmp_path / "runs")
    compiled.log_to(logger)
    steps = list(loader(compiled, tokens=sum(LENGTHS) // 2))
    results = [compiled.train_step(step, clip=CLIP) for step in steps]
    logger.close()
    read = events.EventAccumulator(str(tmp_path / "runs"))
    read.Reload()
    for name, want in {
        "loss": [float(r.loss) for r in results],
        "grad_norm": [r.grad_norm for r in results],
        "busy_s/rank_0": [r.busy_s[0] for r in results],
        "busy_predicted_s/rank_0": [s.plan.busy_s[0] for s in steps],
        "seconds/predicted": [s.plan.makespan_s for s in steps],
    }.items():
        assert [e.value for e in read.Scalars(name)] == pytest.approx(want, rel=1e-5), name
    assert len(read.Scalars("imbalance/measured")) == len(steps) > 1


def test_without_tensorboard_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install tensorboard"):
        dcpc.TensorBoardLogger(tmp_path)
