"""TRL #6843, torchtitan #2536: packed sequences, split over ranks, see nothing of each other."""

import copy
import warnings

import pytest
import torch
from torch import Tensor

import dcpc
from tests.cases.asks import entry, far
from tests.cases.exactness import SPLITTING
from tests.cases.launch import run_ranks
from tests.cases.packed_models import POSITIONS, Sequences, alone, transformers_model

pytestmark = pytest.mark.multirank

# Of any length, one of one token; neither 2 nor 4 ranks divide the row, and documents are cut.
DOCUMENTS = [13, 1, 7, 2, 9, 5]
NUMBERS = torch.cat([torch.full((n,), i) for i, n in enumerate(DOCUMENTS)])
ROW = len(NUMBERS)


def row(counts: int, changed: bool = False) -> dict[str, Tensor]:
    """A packed row in which only one document's labels count, and all others may be changed."""
    ids = torch.randint(64, (ROW,), generator=torch.Generator().manual_seed(0))
    ids = torch.where(counts != NUMBERS, (ids + 7) % 64, ids) if changed else ids
    places = torch.cat([torch.arange(n) for n in DOCUMENTS])
    labels = torch.where((counts == NUMBERS) & (places > 0), ids, -100)
    return {n: x[None] for n, x in zip(POSITIONS, (ids, places, labels), strict=True)}


def leaks(rank: int, world: int, name: str, ways: list[str]) -> dict[str, float]:
    """How much loss and gradients of a document change with all others, and are off alone."""
    warnings.simplefilter("ignore")
    model, found = transformers_model(name), {}
    plain, buckets = copy.deepcopy(model), dcpc.Buckets(POSITIONS, sizes=[{"seq": ROW}])

    def run(inputs: dict[str, Tensor], compiled: dcpc.CompiledModel) -> list[Tensor]:
        model.zero_grad()
        loss = compiled(**inputs)
        loss.backward()
        compiled.reduce_gradients()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    for way in ways:
        compiled = dcpc.compile(
            model, buckets, backend="eager", device=SPLITTING, sp=world, attention=way, verify="off"
        )
        for counts in (0, 2, 5):
            plain.zero_grad()
            loss = plain(**{n: x[:, counts == NUMBERS] for n, x in row(counts).items()})["loss"]
            loss.backward()
            got = run(row(counts), compiled)
            expected = [loss.detach(), *(p.grad for p in plain.parameters())]
            found[f"{way} {counts} alone"] = max(map(far, got, expected))
            other = run(row(counts, changed=True), compiled)
            found[f"{way} {counts} leak"] = max(
                float((x - y).abs().max()) for x, y in zip(got, other, strict=True)
            )
    return found


def check(ranks: list[dict[str, float]]) -> None:
    for found in ranks:
        assert not {k: e for k, e in found.items() if not e < (1e-10 if "alone" in k else 1e-16)}


@pytest.mark.slow
def test_no_document_of_a_split_row_sees_another():
    check(run_ranks(leaks, 2, 2, "llama", ["heads", "ring"], timeout_s=120))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral"])  # the latter with a sliding window of 7
def test_nor_does_it_over_more_ranks_than_groups_of_heads(name):
    check(run_ranks(leaks, 4, 4, name, ["heads", "gathered", "ring", "hybrid"], timeout_s=300))


def training(rank: int, world: int) -> tuple[float, list[float], int]:
    """The largest error of steps on packed rows, the share of padding packed and not, and rows."""
    warnings.simplefilter("ignore")
    model, data = transformers_model("llama"), Sequences([13, 1, 7, 2, 9, 5, 37, 3, 20, 4, 11, 2])
    plain, worst, rows = copy.deepcopy(model), 0.0, 0
    buckets = dcpc.Buckets(POSITIONS, sizes=[{"seq": ROW}])
    compiled = dcpc.compile(
        model, buckets, backend="eager", device=SPLITTING, sp=world, verify="off"
    )
    loader = dcpc.DataLoader(  # no thread: the plain model here changes torch's default dtype
        data, compiled, tokens_per_step=74, packing=True, weight="labels", lookahead=0
    )
    for step in loader:
        model.zero_grad()
        plain.zero_grad()
        loss = alone(plain, data, [i for r in step.rows for i in r], list(POSITIONS))
        loss.backward()
        worst = max(worst, far(compiled.train_step(step).loss, loss.detach()))
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        worst = max(worst, *(far(p.grad, q.grad) for p, q in pairs))
        rows += len(step.rows)
    stats = loader.stats()
    return worst, [stats.padding, stats.tokens], rows


@pytest.mark.slow
def test_packed_rows_train_as_single_sequences():
    for worst, (padding, tokens), rows in run_ranks(training, 2, 2, timeout_s=120):
        assert worst < 1e-10
        whole = 12 * ROW - tokens
        said = (
            f"{tokens} tokens in {rows} rows, {padding} of padding ({whole} in rows of their own)"
        )
        assert said in entry(__file__)
    filled = sum(-n % 4 for n in DOCUMENTS)
    assert f"{filled} more in documents filled up to multiples of 2 * 2" in entry(__file__)
