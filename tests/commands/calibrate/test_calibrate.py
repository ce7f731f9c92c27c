"""Calibrating a small model for real: what is timed, and who takes the result."""

import pytest
import torch
from torch import fx
from typer.testing import CliRunner

import dcpc
from dcpc.api import plan
from dcpc.codegen import excerpt
from dcpc.commands.calibrate import calibrate
from dcpc.commands.calibrate.measure import Bench, Whole
from dcpc.commands.calibrate.timed import Timed, typical_blocks
from dcpc.commands.cli import app
from dcpc.errors import ProfileError
from dcpc.symbolic_profile import Calibration, calibrated, evaluator, find, profile_partition
from dcpc.symbolic_profile.ops.facts import Facts
from models.gpt import GPT, GPTConfig
from tests.cases import joint_graphs
from tests.cases.joint_graphs import capture, case

TEXT = dict.fromkeys(("input_ids", "labels"), "int64[batch, seq]")
DIMS = {"batch": 2, "seq": 24}


def model(layers=2):
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=16, dim=32, n_layers=layers, n_heads=2))


def buckets(*lengths):
    return dcpc.Buckets(TEXT, [{"seq": n} for n in lengths])


@pytest.fixture(scope="module")
def found():
    return calibrate(model(), buckets(16, 48), backend="eager", budget_s=1.0)


def test_two_blocks_of_many_are_kept():
    two, four = (capture(joint_graphs.GPT(layers=n)).partition.forward for n in (2, 4))
    kept = len(typical_blocks(four))
    calls = [sum(n.op == "call_function" for n in gm.graph.nodes) for gm in (two, four)]
    assert calls[0] - 8 < kept <= calls[0] < calls[1]  # a block's first calls may follow the last


def test_excerpt_computes_what_the_graph_does():
    partition = case("gpt").partition
    timed = Timed(partition.forward, Facts(partition.names), torch.device("cpu"))
    gm, before = timed.gm, str(timed.gm.graph)
    part = excerpt(gm, [n.name for n in timed.calls[5:25]])
    assert str(gm.graph) == before
    part.graph.lint()
    made = Recorded(gm)
    made.run(*timed.arguments(DIMS, {}))
    inputs = [made.values[n.name] for n in part.graph.nodes if n.op == "placeholder"]
    outputs = [n.name for n in next(iter(reversed(part.graph.nodes))).all_input_nodes]
    assert outputs
    for name, value in zip(outputs, part(*inputs), strict=True):
        assert torch.equal(value, made.values[name]), name


class Recorded(fx.Interpreter):
    def __init__(self, gm):
        super().__init__(gm, garbage_collect_values=False)
        self.values = {}

    def run_node(self, n):
        value = self.values[n.name] = super().run_node(n)
        return value


def test_each_call_has_seconds_and_values_are_freed():
    parts = case("gpt").partition
    timed = Timed(parts.backward, Facts(parts.names), torch.device("cpu"))
    seconds = timed.seconds_each(timed.arguments(DIMS, {}))
    assert len(seconds) == len(timed.calls)
    assert min(seconds) > 0


def test_calls_between_two_points_are_as_much_slower_as_there(monkeypatch):
    between = []

    def measured(self, points, until_s):
        monkeypatch.setattr(Bench, "_alone_s", lambda self, timed, node, sizes: 1.0)
        slow = [4.0 if p["seq"] == 16 else 36.0 for p in points]
        wholes = [
            Whole(p, self._samples(p, [x] * len(self._calls)), x, x)
            for p, x in zip(points, slow, strict=True)
        ]
        between.extend(self._alone(wholes))
        return measure(self, points, until_s)

    measure = Bench.measure
    monkeypatch.setattr(Bench, "measure", measured)
    calibrate(model(), buckets(16, 48), backend="eager", budget_s=0.5)
    assert between
    assert all(s.seconds_s == pytest.approx(12.0) for s in between)


def test_calibrated_seconds_are_the_sum_of_the_fits(found):
    profile = profile_partition(case("gpt").partition)
    device = calibrated(find("cpu"), found.fits)
    total = 0.0
    for w in profile.work:
        fit = found.fits.of(w)
        flops, moved = (
            float(e.subs({s: DIMS[s.name] for s in e.free_symbols}))
            for e in (w.flops, w.bytes_moved)
        )
        total += w.count * (fit.launch_s + fit.busy_s(flops, moved))
    assert evaluator(profile).seconds(DIMS, device) == pytest.approx(total)
    batch = {n: torch.tensor([size, size]).numpy() for n, size in DIMS.items()}
    assert evaluator(profile).seconds(batch, device) == pytest.approx([total, total])


def test_classes_and_points_of_a_real_model(found):
    classes = {f.op_class for f in found.fits.classes}
    assert {"matmul", "attention", "pointwise", "reduction", "copy"} <= classes
    assert {p.sizes["seq"] for p in found.points} == {16, 48}
    assert all(p.measured_s > 0 and p.predicted_s > 0 for p in found.points)
    assert found.fits.collectives == ()
    assert found.key.world == 1


def test_compile_takes_it_at_other_lengths_and_says_so(found, tmp_path):
    found.write(tmp_path / "c.json")
    compiled = dcpc.compile(
        model(), buckets(32, 40), backend="eager", calibration=tmp_path / "c.json"
    )
    prediction = compiled.predict({"seq": 40})
    assert prediction.seconds_error == found.fits.error
    assert f"± {found.fits.error:.1%}" in compiled.report()
    assert find("cpu").seconds_error is None


def test_other_model_is_refused(found):
    with pytest.raises(ProfileError, match="another model, of graph hash"):
        plan(model(layers=1), buckets(16), backend="eager", calibration=found)


MODELS = """
from models.gpt import GPT, GPTConfig

def tiny():
    return GPT(GPTConfig(vocab_size=16, dim=32, n_layers=1, n_heads=2))
"""
BUCKETS = """
inputs:
  input_ids: int64[batch, seq]
  labels: int64[batch, seq]
sizes:
  - {seq: 16}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "calibrated_models.py").write_text(MODELS)
    (tmp_path / "buckets.yaml").write_text(BUCKETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def run(command, *options):
    given = [command, "calibrated_models:tiny", "--buckets", "buckets.yaml", "--backend", "eager"]
    return CliRunner().invoke(app, [*given, *options])


def test_command_writes_what_report_takes(folder):
    result = run("calibrate", "--device", "cpu", "--out", "c.json")
    assert result.exit_code == 0, result.output
    assert "in the median of these sizes, up to" in result.output
    found = Calibration.read("c.json")
    report = run("report", "--calibration", "c.json")
    assert report.exit_code == 0, report.output
    assert f"± {found.fits.error:.1%}" in report.output


def test_one_under_autocast_is_taken_by_a_plan_under_it(folder):
    result = run("calibrate", "--device", "cpu", "--autocast", "bfloat16", "--out", "c.json")
    assert result.exit_code == 0, result.output
    assert "1 rank, torch.bfloat16" in result.output
    report = run("report", "--calibration", "c.json", "--autocast", "bfloat16")
    assert report.exit_code == 0, report.output
    refused = run("report", "--calibration", "c.json")
    assert "dtype torch.bfloat16 (expected torch.float32)" in refused.output


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--device", "tpu"), "got --device 'tpu'; expected one of auto, cpu, cuda"),
        (("--autocast", "int8"), "got --autocast 'int8'"),
        (("--out", "."), "--out .: got a folder"),
    ],
)
def test_wrong_option_is_refused(folder, options, reason):
    result = run("calibrate", *options)
    assert result.exit_code == 1
    assert reason in result.output
