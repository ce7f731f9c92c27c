"""benchmarks.gpu: on a CPU the same program runs on tiny models; without a GPU nothing is said."""

import json
import subprocess
import sys

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import Speeds, gain, over_best
from benchmarks.gpu_attention import Shape, Speed, ways
from benchmarks.gpu_models import full
from dcpc.buckets import BATCH


def test_without_a_gpu_nothing_is_measured(monkeypatch, capsys, tmp_path):
    file = tmp_path / "gpu.json"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu", "--json", str(file)])
    gpu.main()
    assert "torch sees no GPU" in capsys.readouterr().out
    assert not file.exists()


def test_gains_are_of_lengths_that_both_have():
    both, one = {"auto": 4.0, "none": 2.0}, {"auto": 4.0, "none": None}
    rates = [Speeds("m", {"seq": 1}, both), Speeds("m", {"seq": 2}, one)]
    assert gain(rates, "none", "auto") == 2.0
    assert gain(rates[1:], "none", "auto") is None


def test_attention_is_as_far_from_the_best_as_its_worst_shape():
    short, long = Shape(1, 1, 64, 8), Shape(1, 1, 128, 8)
    found = [
        Speed("dcpc", short, 1.0, 1.0), Speed("torch flash", short, 2.0, 2.0),
        Speed("dcpc", long, 3.0, 3.0), Speed("torch flash", long, None, None),
    ]  # fmt: skip
    assert over_best(found) == 2.0


def test_all_ways_of_attention_give_the_same_gradients():
    given = [torch.randn(2, 4, 9, 8, dtype=torch.float64) for _ in range(4)]
    found = {}
    for name, attend in ways(torch.device("cpu")).items():
        q, k, v = (t.clone().requires_grad_() for t in given[:3])
        attend(q, k, v).backward(given[3])
        found[name] = torch.cat([q.grad, k.grad, v.grad])
    assert {"dcpc", "dcpc blocks", "torch math"} <= found.keys()
    for gradients in found.values():
        torch.testing.assert_close(gradients, found["torch math"])


def test_lengths_to_predict_are_not_those_of_the_calibration():
    for subject in full():
        assert len(subject.shapes) == 8
        assert not any(
            {n: s for n, s in sizes.items() if n != BATCH} in subject.calibrated
            for sizes in subject.shapes
        )


@pytest.mark.slow
def test_it_runs_on_a_cpu(tmp_path):
    file = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--quick"]
    subprocess.run([*command, "--json", str(file)], check=True, timeout=500)
    figures = json.loads(file.read_text())["figures"]
    assert figures["device"] == "CPU"
    assert figures["points"] == 6
    assert figures["max_error_peak"] < 0.005
    assert figures["pyramid_over_full"] > 0
    assert figures["compiled_over_torch_compile"] > 0
    assert figures["attention_over_best"] >= 1
