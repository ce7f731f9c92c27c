"""`dcpc.compile(pipeline=)` beside the plain model: loss, every gradient, the state after steps."""

import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dcpc
from dcpc.commands.replay import replay
from dcpc.errors import DataError, DcpcError, DispatchError, GroupError, PlanError
from dcpc.runtime.data.steps import Step
from dcpc.runtime.planner.plan_file import PlanFile
from tests.cases import language_models
from tests.cases.asks import (
    PAD,
    TEXT,
    Texts,
    far,
    gpt,
    next_after_checkpoint,
    plain_step,
    ran,
    trained,
)
from tests.cases.exactness import SPLITTING
from tests.cases.launch import run_prepared, run_ranks
from tests.cases.ready import Ready
from tests.cases.stages import CASES

pytestmark = pytest.mark.multirank

DATA = Texts([48, 10, 16, 37, 24, 16, 48, 5, 12, 40, 16], silent=[2])


@dataclass(frozen=True)
class Pairs:
    """Samples of an encoder-decoder: each source has its target, both of any length."""

    lengths: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> Mapping[str, Tensor]:
        source, target = self.lengths[i]
        made = CASES["t5"].data({"batch": 1, "source": source, "target": target}, i)
        return {name: x[0] for name, x in made.items()}


PAIRS = Pairs(((16, 8), (9, 5), (40, 20), (48, 24), (30, 8), (12, 8), (16, 24)))


def parts(name: str) -> tuple[nn.Module, dcpc.Buckets, Any, dict[str, int]]:
    """Returns a model, its buckets of at most 2 samples, data, and what fills it up."""
    if name == "t5":
        sizes = [{**s, "batch": 2} for s in CASES["t5"].sizes]
        pad = {"input_ids": 0, "attention_mask": 0, "labels": -100}
        return CASES["t5"].make(), dcpc.Buckets(CASES["t5"].inputs, sizes), PAIRS, pad
    model = gpt(layers=4) if name == "gpt" else CASES[name].make()
    sizes = [{"seq": n, "batch": 2} for n in (16, 48)]
    return model, dcpc.Buckets(TEXT, sizes=sizes), DATA, PAD


def ready(name: str, ranks: int, stages: int, options: dict[str, Any]) -> Ready:
    """A model to be compiled by some ranks."""
    warnings.simplefilter("ignore")
    if name == "llama":
        language_models.in_float64()
    model, buckets, _, _ = parts(name)
    options = {"backend": "eager", "device": SPLITTING, "verify": "off", **options}
    return Ready(model, buckets, ranks, pipeline=stages, **options)


def loaded(compiled: dcpc.CompiledModel, name: str, tokens: int = 150):
    _, _, data, pad = parts(name)
    loader = dcpc.DataLoader(data, compiled, tokens_per_step=tokens, pad=pad, weight=_weight(name))
    return compiled, loader, data


def made(name: str, stages: int, tokens: int = 150, **options: Any):
    warnings.simplefilter("ignore")
    model, buckets, _, _ = parts(name)
    options = {"backend": "eager", "device": SPLITTING, "verify": "off", **options}
    return loaded(dcpc.compile(model, buckets, pipeline=stages, **options), name, tokens)


def _weight(name: str) -> Any:
    return dcpc.CountLabels("labels", shift=1) if name in ("llama", "gpt2") else "labels"


def _counted(name: str):
    weigh = _weight(name)
    if weigh == "labels":
        weigh = dcpc.CountLabels("labels")
    return lambda sample: int(weigh(sample))


def trains(name: str, tokens: int, *given: Any) -> tuple[str, int, Ready]:
    return name, tokens, ready(name, *given)


def worst_of(rank: int, given: tuple[str, int, Ready]) -> tuple[float, float, list[Any], int]:
    """Returns the worst error of a gradient or loss, of the state after an epoch, and counts.

    The last count is of backwards in two parts.
    """
    warnings.simplefilter("ignore")
    name, tokens, prepared = given
    compiled, loader, data = loaded(prepared.compile(), name, tokens)
    alone = parts(name)[0]
    steps = list(loader)
    found = trained(compiled, steps, alone, data, _counted(name))
    assert sorted(found.samples) == list(range(len(data)))
    apart = sum(text.count("I") for step in steps for text in step.plan.pipelines)
    state, plain = compiled.state_dict(), alone.state_dict()
    assert list(state) == list(plain)
    return found.worst, max(far(state[n], plain[n]) for n in plain), found.counts, apart


@pytest.mark.parametrize(
    ("name", "ranks", "stages", "tokens", "options"),
    [
        ("t5", 4, 4, 700, {}),
        ("llama", 4, 2, 150, {"sp": 2}),
        ("gpt_tied", 4, 2, 150, {"parameters": "step"}),
    ],
)
@pytest.mark.slow
def test_steps_have_the_plain_models_numbers(name, ranks, stages, tokens, options):
    given = name, tokens, ranks, stages, options
    found = run_prepared(trains, worst_of, ranks, *given, timeout_s=240.0)
    for worst, state, counts, apart in found:
        assert worst < 1e-10
        assert state < 1e-10
        assert apart > 0, "some backwards are run in two parts"
        assert len({*counts}) > 1, "another number of micro-batches from step to step"


def refusals(rank: int, prepared: Ready) -> dict[str, str]:
    """Returns what is said to each thing that a model in stages does not do."""
    warnings.simplefilter("ignore")
    compiled, loader, _ = loaded(prepared.compile(), "gpt")
    batch, step = DATA[0], next(iter(loader))
    said = {}
    asked = {
        "call": lambda: compiled(**{n: x[None] for n, x in batch.items()}),
        "reduce_gradients": compiled.reduce_gradients,
        "source": lambda: compiled.source({"seq": 16}),
        "mode": lambda: dcpc.DataLoader(DATA, compiled, tokens_per_step=9, pad=PAD, mode="intra"),
        "clip": lambda: compiled.train_step(step, clip=-1.0),
        "circle": lambda: compiled.train_step(_damaged(step, rank == 1)),
    }
    for what, call in asked.items():
        with pytest.raises((DataError, DispatchError, PlanError)) as error:
            call()
        said[what] = str(error.value)
    with tempfile.TemporaryDirectory() as folder:
        loader.save_plan(step, f"{folder}/plan")
        said["replayed"] = replay(PlanFile.read(f"{folder}/plan"))
    model = gpt(layers=4)
    for option, value in OPTIONS.items():
        with pytest.raises(PlanError) as refused:
            dcpc.compile(model, parts("gpt")[1], pipeline=2, **{option: value})
        said[option] = str(refused.value)
    # Its numbers are as if nothing of that had been asked.
    result = compiled.train_step(step, clip=1e-3)
    squares = sum(float(p.grad.pow(2).sum()) for p in compiled.parameters())
    plain = gpt(layers=4)
    ids = [i for mb in step.plan.micro_batches for i in mb.sample_ids]
    plain_step(plain, DATA, ids, _counted("gpt"))
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()]))
    said["norm"] = str(abs(result.grad_norm / norm - 1))
    said["squares"] = str(squares)
    state = {n: x * 2 for n, x in plain.state_dict().items()}
    compiled.load_state_dict(state)
    again = compiled.state_dict()
    said["loaded"] = str(max(far(again[n], state[n]) for n in state))
    return said


def _damaged(step: Step, here: bool) -> Step:
    """Returns a step whose schedule does not end, on the rank where it is damaged."""
    count = len(step.micro_batches)
    order = " ".join(f"B{i} F{i}" for i in range(count))
    zeros = " ".join("0" * count)
    text = f"{order}:{zeros};{order}:{zeros}"
    return replace(step, plan=replace(step.plan, pipelines=(text,))) if here else step


OPTIONS = {"sp": [1, 2], "parameters": "rounds", "speeds": "auto"}


def test_what_does_not_go_with_stages_is_refused_by_name_and_changes_nothing():
    found = run_prepared(ready, refusals, 2, "gpt", 2, 2, {}, timeout_s=240.0)
    for said in found:
        for what in ("call", "reduce_gradients", "source"):
            assert "pipeline=" in said[what]
        assert "rank 1: schedule: got B0" in said["circle"]
        assert "on 1 pipelines of 2 ranks" in said["replayed"]
        assert "  stage 1: F" in said["replayed"]
        for option in OPTIONS:
            assert f"got {option}=" in said[option]
            assert "expected" in said[option]
        assert float(said["norm"]) < 1e-10
        assert float(said["loaded"]) == 0.0
    # No parameter of this model is in both stages: the norm is that of all of them together.
    assert sum(float(said["squares"]) for said in found) ** 0.5 == pytest.approx(1e-3, rel=1e-4)


LAYOUTS = ({"pipeline": 2, "sp": 2, "parameters": "step"}, {}, {"pipeline": 4})


def layouts() -> list[Ready]:
    warnings.simplefilter("ignore")
    options = {"backend": "eager", "verify": "off", "device": SPLITTING}
    buckets = parts("gpt")[1]
    return [Ready(gpt(layers=4), buckets, 4, **options, **layout) for layout in LAYOUTS]


def resumed(rank: int, prepared: list[Ready], folder: str) -> list[float]:
    """Returns how far from the plain model's a step is after checkpoints of other layouts."""
    warnings.simplefilter("ignore")
    alone, found, loss = gpt(layers=4), [], []
    plain = torch.optim.AdamW(alone.parameters(), lr=0.1)
    for number, each in enumerate(prepared):
        compiled = each.compile()
        loader = dcpc.DataLoader(DATA, compiled, samples_per_step=2, pad=PAD, weight="labels")
        of_step, errors = next_after_checkpoint(
            folder, number, compiled, loader, alone, plain,
            lambda ids: plain_step(alone, DATA, ids, _counted("gpt")),
        )  # fmt: skip
        loss.append(of_step)
        found += errors
    assert len({*map(float, loss)}) == len(LAYOUTS), "each step has other samples"
    return found


class Untrained(nn.Module):
    """All of its parameters are in its first call, by the hook of torch's old `weight_norm`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.Linear(2, 32, bias=False, dtype=torch.float64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.layer = nn.utils.weight_norm(layer)  # its weight is no leaf: it has no deepcopy

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = self.layer(x)
        h = nn.functional.scaled_dot_product_attention(h, h, h)
        return (h.mean(-1) - labels).square().mean()


class Points:
    """Four samples of 8 points."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(i)
        x = torch.randn(8, 3, generator=draw, dtype=torch.float64)
        return {"x": x[:, :2], "labels": x[:, 2]}


def untrained(rank: int, folder: str) -> tuple[list[list[int]], float, float, int, list[str]]:
    """Returns the shapes of a stage's parameters, errors, and what its checkpoint is of."""
    model, alone = Untrained(), Untrained()
    inputs = {"x": "float64[batch, seq, 2]", "labels": "float64[batch, seq]"}
    buckets = dcpc.Buckets(inputs, sizes=[{"seq": 8, "batch": 2}])
    compiled = dcpc.compile(model, buckets, pipeline=2, backend="eager", device=SPLITTING,
                            verify="off")  # fmt: skip
    loader = dcpc.DataLoader(Points(), compiled, samples_per_step=4,
                             pad=dict.fromkeys(inputs, 0.0), weight="labels")  # fmt: skip
    worst = trained(compiled, loader, alone, Points(), lambda sample: 1).worst
    batch = {n: torch.stack([Points()[i][n] for i in range(2)]) for n in inputs}
    evaluated = far(compiled.evaluate(batch), alone(**batch).detach())
    # Its state is there from the start.
    adagrad = torch.optim.Adagrad(compiled.named_parameters())
    [named] = [group["param_names"] for group in adagrad.param_groups]
    compiled.save(folder, step=3, optimizer=adagrad)
    step = compiled.load(folder, optimizer=adagrad).step
    assert [group["param_names"] for group in adagrad.param_groups] == [named], "not rank 0's"
    assert named == [name for name, _ in compiled.named_parameters()]
    shapes = [list(p.shape) for p in compiled.parameters()]
    return shapes, worst, evaluated, step, sorted(model.state_dict())


def test_a_stage_that_trains_nothing_has_an_optimizer(tmp_path):
    found = run_ranks(untrained, 2, str(tmp_path), timeout_s=60.0)
    assert [shapes for shapes, *_ in found] == [[[32, 1], [32, 2]], [[0, 0]]]
    for _, worst, evaluated, step, names in found:
        assert max(worst, evaluated) < 1e-10
        assert step == 3
        assert names == ["layer.weight_g", "layer.weight_v"]


@pytest.mark.slow
def test_checkpoints_go_on_in_any_number_of_stages_and_in_none(tmp_path):
    resuming = partial(resumed, folder=str(tmp_path))
    for errors in run_prepared(layouts, resuming, 4, timeout_s=240.0):
        assert max(errors) < 1e-10


def grouped() -> Ready:
    warnings.simplefilter("ignore")
    buckets = dcpc.Buckets(TEXT, sizes=[{"seq": n, "batch": 2} for n in (17, 49)])
    return Ready(gpt(), buckets, 4, pipeline=2, sp=2, backend="eager", device=SPLITTING)


def in_groups(rank: int, made: Ready) -> tuple[Any, str, int, list[float], str, set[int]]:
    """Returns what comes of two stages of two ranks each, at lengths that 2 does not divide."""
    warnings.simplefilter("ignore")
    compiled = made.compile()
    loader = dcpc.DataLoader(DATA, compiled, tokens_per_step=150, pad=PAD, weight="labels")
    alone = gpt()
    found = trained(compiled, loader, alone, DATA, _counted("gpt"))
    errors = []
    for length in (17, 13, 3):
        batch = {n: torch.stack([DATA[i][n][:length] for i in (0, 4)]) for n in TEXT}
        with torch.no_grad():
            losses = [compiled.evaluate(batch), compiled(**batch)]
        errors += [far(x, alone(**batch).detach()) for x in losses]
    assert compiled.model.training
    assert not any(x.requires_grad for x in losses)
    with pytest.raises(GroupError) as error:
        compiled.evaluate({n: x.flip(0) if rank == 1 else x for n, x in batch.items()})
    step = next(iter(loader))  # nothing of it is left over
    loss = compiled.train_step(step).loss
    ids = [i for mb in step.plan.micro_batches for i in mb.sample_ids]
    errors.append(far(loss, plain_step(alone, DATA, ids, _counted("gpt"))))
    ran_at = {mb.shape["seq"] for mb in step.plan.micro_batches}
    return found, compiled.report(), compiled.stage, errors, str(error.value), ran_at


def test_stages_of_several_ranks_have_the_plain_models_numbers():
    ranks = run_prepared(grouped, in_groups, 4, timeout_s=240.0)
    assert [each[2] for each in ranks] == [0, 0, 1, 1], "neighbours run a stage together"
    for found, report, _, errors, said, ran_at in ranks:
        assert ran_at <= {*DATA.lengths}, "micro-batches are as long as their longest sample"
        assert max(errors) < 1e-10
        assert "checksum of input" in said
        assert found.worst < 1e-10
        assert len({*found.counts}) > 1, "another number of micro-batches from step to step"
        assert all(len({*step}) == 1 for step in found.counts), "all ranks run all micro-batches"
        assert "1 pipelines of 2 stages of 2 ranks" in report
        assert "2 stages of 2 ranks, the least recompute: loss and every gradient" in report


class Damaged(Texts):
    """One sample has a token that the model has not; another has no label that counts."""

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        sample = super().__getitem__(i)
        return {**sample, "input_ids": sample["input_ids"] + 1000 * (i == 3)}


def odd_steps(rank: int) -> tuple[list[tuple[int, ...]], list[float], str]:
    """A step with a sample for one of two pipelines, then one with a sample that is wrong.

    One rank of each pipeline is slow.
    """
    warnings.simplefilter("ignore")
    data = Damaged([16, 12, 16, 16])
    compiled = dcpc.compile(gpt(layers=4), parts("gpt")[1], pipeline=2, backend="eager",
                            verify="off", speeds=[1.0, 0.2, 1.0, 0.2])  # fmt: skip
    loader = dcpc.DataLoader(
        data, compiled, samples_per_step=1, shuffle=False, pad=PAD, weight="labels", lookahead=0
    )
    counts, errors = [], []
    try:
        for step in loader:
            result = compiled.train_step(step)
            plain = gpt(layers=4)
            loss = plain_step(plain, data, [step.index], _counted("gpt"))
            own = dict(plain.named_parameters())
            errors += [far(result.loss, loss)]
            errors += [far(p.grad, own[n].grad) for n, p in compiled.named_parameters()]
            counts.append(ran(step))
            compiled.zero_grad()
    except DcpcError as error:
        return counts, errors, str(error)
    return counts, errors, ""


@pytest.mark.slow
def test_a_pipeline_without_samples_waits_and_a_wrong_sample_is_an_error_on_all_ranks():
    for counts, errors, said in run_ranks(odd_steps, 4, timeout_s=240.0):
        assert counts == [(1, 1, 0, 0)] * 3
        assert max(errors) < 1e-10
        assert "sample 3" in said


def by_inductor(rank: int) -> tuple[float, str, int]:
    """Returns the worst error of an epoch of stages that Inductor compiles, and the report."""
    compiled, loader, data = made("gpt", 2, backend="inductor", verify="auto")
    before = compiled.stats().variants
    found = trained(compiled, loader, parts("gpt")[0], data, _counted("gpt"))
    return found.worst, compiled.report(), before


@pytest.mark.slow
def test_stages_that_inductor_compiles_are_verified_before_the_first_step():
    for rank, (worst, report, before) in enumerate(run_ranks(by_inductor, 2, timeout_s=400.0)):
        assert worst < 1e-8
        assert "2 stages, the least recompute, the graphs that inductor compiles: loss" in report
        assert f"2 stages, the least recompute, stage {rank} as inductor compiled it" in report
        assert "NOT compared" not in report
        assert before == 1, "this rank's stage is compiled, and no other"
