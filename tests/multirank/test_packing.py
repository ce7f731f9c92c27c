"""Training on packed rows against the plain model on the same sequences, each alone."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DataCollatorWithFlattening

import dcpc
from dcpc.passes.masks.packable import packable
from dcpc.passes.sharding.attention_ways import lowering_of
from dcpc.plan.folding import lift_of
from dcpc.plan.prices.priced import Priced
from dcpc.plan.traced import traced
from tests.cases.exactness import SPLITTING, SplitModel, compiled_error, gradient_error, loss_error
from tests.cases.launch import run_prepared
from tests.cases.packed_models import (
    NUMBERS,
    POSITIONS,
    Documents,
    Frames,
    Sequences,
    alone,
    transformers_model,
)
from tests.cases.ready import Ready

LENGTHS = [3, 9, 5, 30, 12, 2, 7, 41, 1, 19, 8, 8, 4, 6, 25, 11, 2, 3]
SIZES = [{"seq": 12}, {"seq": 41}]
# name -> model, its inputs, what the loader makes for it
CASES = {
    "llama": (lambda: transformers_model("llama"), POSITIONS, True),
    "llama eager": (
        lambda: transformers_model("llama", attn_implementation="eager"), POSITIONS, True,
    ),
    "qwen2": (lambda: transformers_model("qwen2"), POSITIONS, True),
    "mistral": (lambda: transformers_model("mistral"), POSITIONS, True),
    "documents": (Documents, NUMBERS, "segment_ids"),
    "documents, both ways": (lambda: Documents(causal=False), NUMBERS, "segment_ids"),
}  # fmt: skip


def ready(case: str, world: int = 1, backend: str = "eager", **options: object) -> Ready:
    """A case to be compiled by some ranks."""
    warnings.simplefilter("ignore")
    make, inputs, _ = CASES[case]
    buckets = dcpc.Buckets(inputs=inputs, sizes=SIZES)
    options = {"device": SPLITTING, "verify": "off", **options}
    return Ready(make(), buckets, world, backend=backend, **options)


def errors(case: str, made: Ready) -> dict[str, float]:
    """Trains an epoch of packed rows, and the plain model on single sequences; all errors."""
    warnings.simplefilter("ignore")
    _, inputs, packing = CASES[case]
    model = made.model
    plain = copy.deepcopy(model)
    data = Sequences(LENGTHS)
    compiled = made.compile()
    if made.options.get("attention", "auto") != "auto":
        assert lowerings(compiled) == {made.options["attention"]}
    loader = dcpc.DataLoader(
        data, compiled, tokens_per_step=100, packing=packing, weight="labels", lookahead=0
    )
    both = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    found, seen, most = {}, [], 0
    for step in loader:
        for optimizer in both:
            optimizer.zero_grad()
        ids = [i for mb in step.plan.micro_batches for i in mb.sample_ids]
        result = compiled.train_step(step)
        expected = alone(plain, data, ids, list(inputs))
        expected.backward()
        gradients = {n: p.grad for n, p in plain.named_parameters()}
        found[f"{case}, loss {step.index}"] = loss_error(result.loss, expected.detach())
        found[f"{case}, gradients {step.index}"] = gradient_error(model, gradients)
        seen += ids
        most = max(most, *map(len, step.rows))
        for optimizer in both:
            optimizer.step()
    found[f"{case}, parameters"] = difference(model, plain)
    assert len(found) > 4, "there are at least two steps"
    assert sorted(seen) == list(range(len(LENGTHS)))
    assert most > 1, "a row holds several sequences"
    return found


@pytest.mark.parametrize("name", ["llama", pytest.param("mistral", marks=pytest.mark.slow)])
def test_a_collators_flattened_batch_is_what_the_plain_model_makes_of_it(name):
    """Rows as transformers' own collator packs them, through the library's own masks."""
    model = transformers_model(name)
    data = Sequences([9, 5, 12, 1, 2, 12])
    given = [{n: x.tolist() for n, x in data[i].items()} for i in range(len(data))]
    inputs = DataCollatorWithFlattening(return_tensors="pt")(given)
    assert inputs["position_ids"].tolist() == [[i for n in data.lengths for i in range(n)]]
    buckets = dcpc.Buckets(inputs=POSITIONS, sizes=[{"seq": 41}])
    compiled = dcpc.compile(model, buckets, backend="eager", device=SPLITTING, verify="off")
    assert compiled_error(compiled, model, dict(inputs)) < 1e-10


def lowerings(compiled: dcpc.CompiledModel) -> set[str]:
    """How the attentions of the longest rows are split."""
    plan = compiled.plans[compiled.buckets.buckets[-1]]
    sizes = {**plan.bucket.sizes, "batch": plan.micro_batch}
    nodes = compiled.runnable.priced.placement(sizes, plan.sp).nodes
    return {lowering_of(x) for name, x in nodes.items() if name.startswith("attention_default")}


def difference(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(float((x - y).abs().max() / y.abs().max()) for x, y in pairs)


def check(found: dict[str, float]) -> None:
    assert not {what: error for what, error in found.items() if not error < 1e-10}


@pytest.mark.parametrize(
    "case", [pytest.param("llama", marks=pytest.mark.slow), "documents, both ways"]
)
def test_training_on_packed_rows_is_training_on_single_sequences(case):
    check(errors(case, ready(case)))


@pytest.mark.slow
def test_packed_rows_under_inductor():
    check(errors("mistral", ready("mistral", backend="inductor")))


def prepared(runs: list[tuple[str, int, str]], world: int) -> list[tuple[str, Ready]]:
    return [(case, ready(case, world, sp=sp, attention=way)) for case, sp, way in runs]


def errors_over_ranks(rank: int, runs: list[tuple[str, Ready]]) -> dict[str, float]:
    found = {}
    for case, made in runs:
        some, options = errors(case, made), made.options
        found |= {f"sp {options['sp']}, {options['attention']}: {w}": e for w, e in some.items()}
    return found


@pytest.mark.multirank
def test_training_on_packed_rows_over_two_ranks():
    runs = [("documents", 2, "heads"), ("documents, both ways", 2, "ring")]
    for found in run_prepared(prepared, errors_over_ranks, 2, runs, 2, timeout_s=280):
        check(found)


def stores(runs: list[tuple[str, dict[str, object]]]) -> list[tuple[str, Ready]]:
    return [(case, ready(case, 2, **options)) for case, options in runs]


def losses_of_stores(rank: int, runs: list[tuple[str, Ready]]) -> dict[str, float]:
    """Errors of the losses of two epochs, each step's after the updates of those before."""
    warnings.simplefilter("ignore")
    found = {}
    for case, made in runs:
        _, inputs, packing = CASES[case]
        plain = copy.deepcopy(made.model)
        data, compiled = Sequences(LENGTHS), made.compile()
        loader = dcpc.DataLoader(
            data, compiled, tokens_per_step=100, packing=packing, weight="labels", lookahead=0
        )
        own = compiled.parameters(), plain.parameters()
        both = [torch.optim.SGD(parameters, lr=0.1) for parameters in own]
        for step in (step for _ in range(2) for step in loader):
            for optimizer in both:
                optimizer.zero_grad()
            ids = [i for mb in step.plan.micro_batches for i in mb.sample_ids]
            loss = compiled.train_step(step).loss
            expected = alone(plain, data, ids, list(inputs))
            expected.backward()
            what = f"{case}, {made.options}, {len(found)}"
            found[what] = loss_error(loss, expected.detach())
            for optimizer in both:
                optimizer.step()
    return found


@pytest.mark.slow
@pytest.mark.multirank
def test_packed_rows_with_shared_parameters_and_recompute():
    runs = [
        ("llama", {"parameters": "rounds"}), ("documents", {"parameters": "rounds", "sp": 2}),
        ("llama", {"parameters": "step"}), ("documents, both ways", {"recompute": "all"}),
    ]  # fmt: skip
    for found in run_prepared(stores, losses_of_stores, 2, runs, timeout_s=280):
        check(found)


def frames(causals: tuple[bool, ...]) -> list[tuple[bool, SplitModel, list[Any]]]:
    """Models of which a rank's queries are some patches of every frame."""
    warnings.simplefilter("ignore")
    buckets = dcpc.Buckets(
        inputs={
            "x": "float64[batch, frames, patches, 8]", "ids": "int64[batch, frames, patches]",
        },
        sizes=[{"frames": 3, "patches": 16}, {"frames": 5, "patches": 40}],
    )  # fmt: skip
    found = []
    for causal in causals:
        split = SplitModel(
            Frames(causal), buckets, {"batch": 1, "frames": 3, "patches": 40}, "eager", 4
        )
        (chosen,) = [x for name, x in split.placement.nodes.items() if name.startswith("attention")]
        assert (chosen.name, chosen.output.index) == ("q", 1)
        points = []
        for shape in ((1, 3, 40), (2, 5, 7)):
            generator = torch.Generator().manual_seed(0)
            x = torch.randn(*shape, 8, generator=generator, dtype=torch.float64)
            ids = torch.randint(0, 3, shape, generator=generator)
            sizes = dict(zip(("batch", "frames", "patches"), shape, strict=True))
            points.append((sizes, {"x": x, "ids": ids}))
            for recompute in ("none", "all"):
                split.ready(sizes, recompute)
        found.append((causal, split, points))
    return found


def errors_of_frames(
    rank: int, models: list[tuple[bool, SplitModel, list[Any]]]
) -> dict[str, float]:
    found = {}
    for causal, split, points in models:
        found |= split.errors(f"causal {causal}", points)
    return found


@pytest.mark.slow
@pytest.mark.multirank
def test_sequences_of_queries_that_do_not_follow_each_other():
    for found in run_prepared(frames, errors_of_frames, 4, (True, False), timeout_s=280):
        check(found)


@pytest.mark.slow
@pytest.mark.multirank
def test_every_packed_model_over_four_ranks():
    runs = [(case, 4, "hybrid") for case in CASES]
    runs += [(case, 4, "ring") for case in ("llama eager", "mistral", "documents, both ways")]
    for found in run_prepared(prepared, errors_over_ranks, 4, runs, 4, timeout_s=580):
        check(found)


def test_finding_the_sequences_sends_nothing():
    """The same model without looking for sequences is split alike, and sends the same bytes."""
    sent = []
    for cache in (False, True):
        model = transformers_model("llama", use_cache=cache, num_hidden_layers=1)
        known = traced(model, dcpc.Buckets(inputs=POSITIONS, sizes=SIZES), SPLITTING, "eager")
        priced = Priced(lift_of(known))
        sizes = {"seq": 41, "batch": 1}
        placement = priced.placement(sizes, 2)
        assert ("cumsum" in placement.nodes) == (not cache)
        reason = packable(known.program, known.sharding.rules).reason
        assert ("sees all of a row" in reason) == cache
        sent.append(priced.at(placement).predict(0, sizes).wire_bytes)
    assert sent[0] == sent[1] > 0
