"""Which slow tests continuous integration leaves out, and what no test leaves behind."""

import logging
import os
import sys
from pathlib import Path

import pytest

from dcpc.passes.sharding import rules
from dcpc.plan import traced
from dcpc.runtime.groups import local_ranks
from tests.cases.one_trace import OneTrace

# A test that fails shows all of dcpc's and torch's frames.
os.environ.setdefault("DCPC_TRACEBACK", "full")

# File -> why its slow tests are run by hand (`make test-slow`), not by `.ci/run`. None of them
# holds a loss or a gradient that no other test holds.
BY_HAND = {
    "benchmarks/test_gpu_checks.py": "checks of a GPU, here that all of them run",
    "benchmarks/test_memory.py": "benchmarks.memory --quick; single points are quick tests",
    "benchmarks/test_model_flops.py": "FLOPs",
    "benchmarks/test_pipeline.py": "bytes of stages of 3 ranks; quick: of one, with the numbers",
    "benchmarks/test_recompute.py": "benchmarks.recompute --quick",
    "benchmarks/test_stdit_costs.py": "costs of a folded model, in seconds and bytes",
    "examples/test_demo.py": "`make demo` with all its baselines: minutes",
    "examples/test_demo_video.py": "`make demo-video` with all its baselines: minutes",
    "examples/test_folding.py": "a training run; tests/multirank/test_folding.py holds the numbers",
    "examples/test_large_model.py": "memory of 4 ranks; test_materialize.py holds the numbers",
    "examples/test_long_context.py": "memory of 4 ranks, in minutes",
    "symbolic_profile/memory/test_lifetimes.py": "bytes",
    "symbolic_profile/memory/test_reserved.py": "bytes of a GPU's segments",
    "symbolic_profile/memory/test_step_memory.py": "bytes of a step",
    "plan/test_folding.py": "costs of folded models",
    "plan/test_planning.py": "which settings need not be priced",
}

# File -> those of its tests that CI leaves out, and why.
ALONE = {
    "benchmarks/test_parameters.py": (
        ["test_quick_benchmark_keeps_its_limits"],
        "bytes and peaks; the file's other tests hold the numbers",
    ),
    "benchmarks/test_zoo_seeds.py": (
        ["test_every_hash_seed_makes_the_same_of_the_zoo"],
        "90 models under 4 seeds: an hour; a small one of what ModernBERT does is run",
    ),
    "gpu_stub/test_gpu_stub.py": (
        [
            "test_mixed_lengths_train_beside_padding_and_packing",
            "test_the_other_measurements_run",
        ],
        "measurements of a GPU, here that they run; `make gpu-stub` has them",
    ),
}


# Tests that are slow beside those with the mark, and slow ones that CI leaves out beside the above.
LISTED, LEFT_OUT = (Path(__file__).with_name(name) for name in ("slow.txt", "by_hand.txt"))


# What dcpc imports late, and most ranks do as they compile: one to two seconds of each.
LATE = ("dcpc.codegen.variant.inductor", "torch.export._trace", "scipy.sparse.csgraph")


def pytest_collection_finish() -> None:
    """Has the server of ranks import what the collected tests imported; forks share it."""
    os.environ["TORCH_WARM_POOL"] = "0"  # with triton, the import starts processes and a thread
    ours = (name for name in sys.modules if name.startswith(("models.", "tests.cases.")))
    local_ranks.PRELOADED += [*LATE, *sorted(ours), "tests.cases.warm"]


def pytest_configure(config: pytest.Config) -> None:
    """Makes the mark known."""
    config.addinivalue_line("markers", "by_hand: slow, and left out of CI; see tests/conftest.py")
    # pytest adds its handlers to each logger that does not propagate; where this one has a handler,
    # torch writes down every step of a trace with its stack, which it does for no user.
    steps = logging.getLogger("torch.__trace")
    steps.propagate = True
    steps.handlers.clear()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the slow tests of the lists and of the files above; mypy, the longest, is the first."""
    items.sort(key=lambda item: item.name != "test_mypy_strict_finds_nothing")
    root = Path(__file__).parent
    listed, by_hand = (set(file.read_text().splitlines()) for file in (LISTED, LEFT_OUT))
    for item in items:
        path = item.path.relative_to(root).as_posix() if root in item.path.parents else ""
        alone, _ = ALONE.get(path, ([], ""))
        left_out = path in BY_HAND or item.name in alone
        if item.nodeid in by_hand or (left_out and item.get_closest_marker("slow")):
            item.add_marker("by_hand")
        if item.nodeid in listed | by_hand:
            item.add_marker("slow")


@pytest.fixture(autouse=True)
def _rules_end_with_their_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sharding rule that a test registers, a tutorial's for one, is gone when the test ends."""
    monkeypatch.setattr(rules, "REGISTERED", dict(rules.REGISTERED))


@pytest.fixture(scope="module")
def _one_trace() -> OneTrace:
    return OneTrace(traced.trace)


@pytest.fixture
def one_trace(monkeypatch: pytest.MonkeyPatch, _one_trace: OneTrace) -> None:
    """Equal models of a file are traced once: tests/cases/one_trace.py."""
    monkeypatch.setattr(traced, "trace", _one_trace)
