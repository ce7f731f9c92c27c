"""Calls without padding on several ranks: loss and every gradient are those of the plain model."""

import copy
import warnings

import pytest
import torch

import dcpc
from dcpc.compiled.unpadding.valid_rows import ValidRows
from dcpc.errors import VerifyError
from dcpc.trace.loss import find_loss
from tests.cases.combinations import Together
from tests.cases.exactness import SPLITTING, compiled_error, gradient_error, loss_error, wrong
from tests.cases.exactness import plain as of_plain
from tests.cases.launch import run_prepared, run_ranks
from tests.cases.padded_models import (
    SIZES,
    T5_INPUTS,
    T5_SIZES,
    TOKENS,
    PaddedEncoder,
    batch,
    bert,
    misplaced,
    t5,
    t5_batch,
    unpadding_of,
)
from tests.cases.ready import Ready

pytestmark = pytest.mark.multirank

BATCHES = [([1, 12, 5], 0), ([1, 1], 0), ([9, 3, 2, 11], 0), ([4, 16, 7], 1), ([16, 16, 0, 3], 1)]


MODELS = {"encoder": (PaddedEncoder, PaddedEncoder.INPUTS), "bert": (bert, TOKENS)}


def ready(name: str, sp: int, backend: str, options: dict) -> tuple[str, Ready]:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    options = {"unpad": True, "sp": sp, "backend": backend, "device": SPLITTING, **options}
    return name, Ready(make().double(), dcpc.Buckets(inputs, SIZES), sp, **options)


def errors(rank: int, prepared: tuple[str, Ready]) -> dict[str, float]:
    warnings.simplefilter("ignore")
    name, of_all = prepared
    inputs, sp = MODELS[name][1], of_all.options["sp"]
    model, made, found = of_all.model, of_all.compile(), {}
    for lengths, at in BATCHES:
        given = batch(inputs, lengths, SIZES[at])
        found[f"{name} {lengths}"] = compiled_error(made, model, given)
        model.zero_grad()
        with torch.no_grad():
            expected = find_loss(model(**given))
            found[f"{name} {lengths}, evaluated"] = loss_error(made.evaluate(given), expected)
    stats = made.stats()
    assert stats.unpadded >= 8, stats.unpadded
    assert f"without padding at sp {sp}: loss and every gradient" in made.report()
    return found


def ready_t5(sp: int, recompute: str) -> Ready:
    warnings.simplefilter("ignore")
    options = {"unpad": True, "backend": "eager", "device": SPLITTING, "verify": "off"}
    buckets = dcpc.Buckets(T5_INPUTS, [T5_SIZES])
    return Ready(t5(2, 2), buckets, sp, sp=sp, recompute=recompute, **options)


def t5_errors(rank: int, ready: Ready) -> dict[str, float]:
    """Both sides of a T5, whose attention has a bias that learns."""
    warnings.simplefilter("ignore")
    model, made, found = ready.model, ready.compile(), {}
    batches = [([16, 3, 9], [12, 2, 5]), ([1, 1, 1], [1, 1, 1]), ([5, 16, 2], [12, 12, 12])]
    for lengths, targets in batches:
        given = t5_batch(lengths, targets)
        found[f"t5 {lengths} {targets}"] = compiled_error(made, model, given)
        model.zero_grad()
    assert made.stats().unpadded == len(batches)
    names = {n.name for n in unpadding_of(made).sides[-1].runnable.traced.program.gm.graph.nodes}
    assert any("attention_of_rows" in n for n in names)
    return found


@pytest.mark.parametrize("name", ["encoder", pytest.param("bert", marks=pytest.mark.slow)])
def test_two_ranks_run_a_call_without_its_padding(name):
    given = name, 2, "eager", {"recompute": "none"}
    found = run_prepared(ready, errors, 2, *given, timeout_s=280)
    assert not wrong(found, 1e-10)


@pytest.mark.slow
def test_two_ranks_run_both_sides_without_padding():
    assert not wrong(run_prepared(ready_t5, t5_errors, 2, 2, "none", timeout_s=280), 1e-10)


@pytest.mark.slow
def test_four_ranks_that_make_values_again_run_a_call_without_its_padding():
    given = "encoder", 4, "eager", {"recompute": "all"}
    found = run_prepared(ready, errors, 4, *given, timeout_s=280)
    assert not wrong(found, 1e-10)


@pytest.mark.slow
def test_two_ranks_run_what_inductor_compiled_without_padding():
    found = run_prepared(ready, errors, 2, "encoder", 2, "inductor", {}, timeout_s=500)
    assert not wrong(found, 1e-10)


def said_of_wrong_positions(rank: int) -> str:
    """What the first call says where its rows are given wrong positions."""
    warnings.simplefilter("ignore")
    ValidRows.__init__ = misplaced(
        ValidRows.__init__
    )  # in this process, which ends with the function
    torch.manual_seed(0)
    model = PaddedEncoder().double()
    buckets = dcpc.Buckets(PaddedEncoder.INPUTS, SIZES)
    made = dcpc.compile(model, buckets, unpad=True, sp=2, backend="eager", device=SPLITTING)
    try:
        made(**batch(PaddedEncoder.INPUTS, [3, 16, 9, 5], SIZES[1]))
    except VerifyError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_the_first_call_of_two_ranks_is_held_against_the_plain_model():
    for said in run_ranks(said_of_wrong_positions, 2, timeout_s=280):
        assert "without padding at sp 2 does not give what the model gives" in said


def loader_errors(rank: int, prepared: tuple[str, Ready]) -> dict[str, float]:
    """A training step of the loader's batches, whose groups of two ranks leave padding out."""
    warnings.simplefilter("ignore")
    model = prepared[1].model
    plain = copy.deepcopy(model)
    lengths = [3, 9, 5, 12, 2, 7, 16, 1, 11, 8]
    made = prepared[1].compile()
    data = [{n: x[0] for n, x in batch(TOKENS, [length], SIZES[1]).items()} for length in lengths]
    found = {}
    for step in dcpc.DataLoader(data, made, tokens_per_step=80, weight="labels", lookahead=0):
        model.zero_grad()
        result = made.train_step(step)
        ids = [i for mb in step.plan.micro_batches for i in mb.sample_ids]
        loss, gradients = of_plain(
            plain, {n: torch.stack([data[i][n] for i in ids]) for n in TOKENS}
        )
        found[f"loss {step.index}"] = loss_error(result.loss, loss)
        found[f"gradients {step.index}"] = gradient_error(model, gradients)
    assert made.stats().unpadded > 1
    return found


@pytest.mark.slow
def test_steps_of_the_loader_leave_padding_out_on_two_ranks():
    given = "bert", 2, "eager", {"verify": "off"}
    found = run_prepared(ready, loader_errors, 2, *given, timeout_s=280)
    assert len(found[0]) > 2
    assert not wrong(found, 1e-10)


def errors_in_rounds(rank: int, more: dict) -> tuple[float, int, str]:
    warnings.simplefilter("ignore")
    pair = Together(("rounds", "unpad"), "", **more)
    worst = max(pair.errors())
    return worst, pair.compiled.stats().unpadded, pair.compiled.report()


@pytest.mark.parametrize(
    "more",
    [
        {"verify": "auto"},
        pytest.param({"recompute": "all", "sp": 2}, marks=pytest.mark.slow),
    ],
)
def test_ranks_of_a_round_gather_together_and_leave_padding_out(more):
    found = run_ranks(errors_in_rounds, 2, more, timeout_s=120)
    assert max(worst for worst, _, _ in found) <= 1e-10
    assert sum(unpadded for _, unpadded, _ in found) > 0
    if more.get("verify"):
        assert any("without padding: loss and every gradient" in said for *_, said in found)
