"""Inductor: sizes that it takes for numbers are guarded; what it cannot lower runs as torch's."""

import threading

import pytest
import torch
from torch import fx, nn
from torch._inductor import config
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional as F

import dcpc
from dcpc.codegen.variant import inductor
from tests.codegen.made import Made


class Pools(nn.Module):
    def __init__(self, pool):
        super().__init__()
        self.inner, self.pool = nn.Linear(8, 8), pool

    def forward(self, x):
        return self.pool(self.inner(x).tanh().exp()).square().mean()


@pytest.mark.slow
def test_a_size_that_one_graph_takes_for_a_number_is_one_in_the_next_and_guarded():
    """Adaptive pooling asks Inductor for its sizes as numbers."""
    made = Made(Pools(lambda x: F.adaptive_avg_pool1d(x.mT, 2)), "inductor")
    for seq in (16, 5):
        assert made.error(2, seq, made.recompute[-1]) < 1e-10


@pytest.mark.slow
def test_an_op_that_inductor_cannot_lower_at_open_sizes_is_torchs_own():
    made = Made(Pools(lambda x: F.adaptive_avg_pool2d(x[:, None], (None, 4))), "inductor")
    for seq in (16, 5):
        assert made.error(2, seq) < 1e-10


@pytest.mark.slow
def test_what_a_call_turned_in_place_has_the_shape_it_was_made_in():
    """A Fourier transform in windows turns its result before it returns it."""

    def windows(x):
        made = torch.stft(
            x.mT.flatten(0, 1), 4, 2, return_complex=True, window=torch.ones(4).double()
        )
        return made.abs()

    made = Made(Pools(windows), "inductor")
    for seq in (16, 5):
        assert made.error(2, seq) < 1e-10


class Convolved(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Conv1d(4, 4, 1), nn.Conv1d(4, 4, 3, padding=1))

    def forward(self, x):
        return self.inner(x).square().mean()


def test_a_convolution_is_compiled_once_for_all_lengths():
    buckets = dcpc.Buckets({"x": "float64[batch, 4, seq]"}, [{"seq": 9}, {"seq": 14}])
    model = Convolved().double()
    compiled = dcpc.compile(model, buckets, backend="inductor", verify="off")
    for seq in (9, 14):
        compiled(x=torch.randn(2, 4, seq, dtype=torch.float64)).backward()
    assert compiled.stats().variants == 1


def test_code_of_another_processor_is_not_taken_from_inductors_cache(monkeypatch):
    mode = FakeTensorMode(shape_env=ShapeEnv())
    gm = fx.symbolic_trace(lambda x: torch.sin(x))
    # Else torch tries by a compiler, for 14 s, whether what the processor says it has can be used.
    monkeypatch.setattr(config.cpp, "vec_isa_ok", True)
    next(iter(gm.graph.nodes)).meta["val"] = mode.from_tensor(torch.ones(4))
    keys = []
    for capability in ("default", ""):  # no vectors, and what this processor has
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)
        taken = pick_vec_isa()

        def compiling(gm, examples, taken=taken):
            assert pick_vec_isa() == taken
            keys.append(config.save_config_portable())

        monkeypatch.setattr(inductor, "compile_fx_inner", compiling)
        inductor.compile_graph(gm, mode)
    assert keys[0] != keys[1]


def test_compiling_that_takes_long_is_told_once_by_rank_0(monkeypatch, caplog):
    told = threading.Event()

    class Now(threading.Timer):
        def __init__(self, patience_s, tell):
            super().__init__(0.0, lambda: (tell(), told.set()))

    monkeypatch.setattr(inductor.threading, "Timer", Now)
    monkeypatch.setattr(inductor, "TOLD", [])
    for rank, lines in (("1", 0), ("0", 1), ("0", 1)):
        monkeypatch.setenv("RANK", rank)
        told.clear()
        with inductor.together():
            assert told.wait(60)
        assert len(caplog.messages) == lines
    assert "Inductor compiles kernels" in caplog.text
    assert cache_dir() in caplog.text
