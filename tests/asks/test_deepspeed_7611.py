"""DeepSpeed #7611, torchtitan #1081: compiling for inputs of random sizes."""

import warnings
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import dcpc
from dcpc.errors import DispatchError
from tests.cases.asks import PAD, TEXT, Texts, entry, gpt, trained
from tests.cases.exactness import SPLITTING, compiled_error
from tests.cases.launch import run_prepared, run_ranks
from tests.cases.ready import Ready

DRAWN = torch.randint(2, 97, (50,), generator=torch.Generator().manual_seed(0))
DATA = Texts(DRAWN.tolist())
GRIDS = {"4": [24, 48, 72, 96], "12": list(range(8, 97, 8)), "95": list(range(2, 97))}


def ready(grid: list[int], world: int = 1, **options: object) -> Ready:
    warnings.simplefilter("ignore")
    buckets = dcpc.Buckets(TEXT, sizes=[{"seq": n} for n in grid])
    model = gpt(layers=1)
    return Ready(model, buckets, world, device=SPLITTING, verify="off", **options)


def compiled(made: Ready, pad_to: str = "longest") -> tuple[dcpc.CompiledModel, dcpc.DataLoader]:
    model = made.compile()
    loader = dcpc.DataLoader(
        DATA, model, tokens_per_step=600, pad=PAD, weight="labels", pad_to=pad_to
    )
    return model, loader


def grids() -> list[tuple[str, str, Ready]]:
    runs = [("4", "longest"), *((name, "bucket") for name in GRIDS)]
    return [(name, pad_to, ready(GRIDS[name], 2, backend="eager")) for name, pad_to in runs]


def epochs(rank: int, grids: list[tuple[str, str, Ready]]) -> dict[tuple[str, str], Any]:
    """Of each grid the largest error, the variants after each epoch, and the share of padding."""
    warnings.simplefilter("ignore")
    found = {}
    for name, pad_to, made in grids:
        model, loader = compiled(made, pad_to)
        alone, worst, variants = gpt(layers=1), 0.0, []
        for _ in range(2):
            worst = max(worst, trained(model, loader, alone, DATA).worst)
            variants.append(model.stats().variants)
        stats = loader.stats()
        found[name, pad_to] = (worst, variants, stats.padding_share)
    return found


@pytest.mark.slow
@pytest.mark.multirank
def test_random_lengths_compile_once_a_degree():
    for found in run_prepared(grids, epochs, 2, timeout_s=240):
        for (buckets, pad_to), (worst, variants, padding) in found.items():
            assert worst < 1e-10
            assert variants == [2, 2], "sp 1 and sp 2, for any number of lengths"
            how = f'{buckets}, `pad_to="bucket"`' if pad_to == "bucket" else buckets
            assert f"| {how} | 2 | {padding:.1%} |" in entry(__file__)


def graphs(dynamic: bool | None) -> int:
    """Returns how many graphs torch.compile makes of the plain model for the same samples."""
    torch._dynamo.reset()
    counter = CompileCounter()
    with torch._dynamo.config.patch(recompile_limit=100):
        model = torch.compile(gpt(), backend=counter, dynamic=dynamic)
        for sample in map(DATA.__getitem__, range(len(DATA))):
            model(**{name: x[None] for name, x in sample.items()})
    return counter.frame_count


@pytest.mark.slow
def test_graphs_that_torch_compile_makes_of_the_same_samples():
    different = len({*DATA.lengths})
    assert graphs(dynamic=False) == different
    said = f"{different} lengths: {different} graphs, {graphs(dynamic=None)} by default"
    assert said in entry(__file__)


def by_inductor(rank: int) -> tuple[float, int, list[tuple[int, ...]]]:
    """Parameters in rounds: graphs have collectives, and each rank compiles at its own time."""
    warnings.simplefilter("ignore")
    buckets = dcpc.Buckets(TEXT, sizes=[{"seq": n} for n in (48, 96)])
    model = dcpc.compile(
        gpt(layers=1), buckets, device=SPLITTING, verify="off", backend="inductor",
        parameters="rounds", sp=1,
    )  # fmt: skip
    loader = dcpc.DataLoader(DATA, model, tokens_per_step=600, pad=PAD, weight="labels")
    found = trained(model, loader, gpt(layers=1), DATA)
    return found.worst, model.stats().variants, found.counts


@pytest.mark.slow
@pytest.mark.multirank
def test_ranks_compile_by_inductor_each_when_it_first_needs_to():
    for worst, variants, counts in run_ranks(by_inductor, 2, timeout_s=240):
        assert worst < 1e-8  # Inductor sums in another order
        assert variants == 1
        assert any(a != b for a, b in counts)


def shapes(loader: dcpc.DataLoader) -> set[int]:
    return {mb.inputs["labels"].shape[1] for step in loader for mb in step.micro_batches}


@pytest.mark.slow
def test_a_length_between_buckets_is_run_as_it_is_by_the_loader_and_by_hand():
    made = ready([48, 96], backend="eager")
    assert shapes(compiled(made, "bucket")[1]) == {48, 96}
    model, loader = compiled(made)
    assert shapes(loader) <= {*DATA.lengths}
    ids = torch.arange(47)[None]
    assert compiled_error(model, model.model, {"input_ids": ids, "labels": ids}) < 1e-10
    with pytest.raises(DispatchError, match="cut the samples to one, or add these lengths"):
        model(input_ids=ids.repeat(1, 3), labels=ids.repeat(1, 3))
