"""benchmarks.gpu_checks: what it would see, and that a CPU runs all of it."""

import copy
import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu_checks import __main__ as command
from benchmarks.gpu_checks import attention
from benchmarks.gpu_checks.exact import judged, ran
from benchmarks.gpu_checks.mixed import Packed, Padded, Texts, model_flops
from benchmarks.gpu_checks.page import BEGIN, END, page, write
from benchmarks.gpu_checks.rows import Setting, error, not_run, same_kind, tried
from benchmarks.gpu_checks.runner import STEPS, run_step
from benchmarks.gpu_checks.speeds import ways
from benchmarks.gpu_checks.subjects import GPT_TINY, compared, full
from dcpc.buckets import BATCH
from models.gpt import GPT

CPU = Setting(torch.device("cpu"), quick=True, numbers=True)
CASE = {case.name: case for case in attention.CASES}
NEEDS = {  # step -> what a CPU cannot show
    "exact_stdit": 1, "exact_llama": 1, "nccl": 1, "mixed": 5,
}  # fmt: skip


def test_without_a_gpu_nothing_is_run(monkeypatch, capsys, tmp_path):
    file = tmp_path / "gpu.json"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_checks", "--json", str(file)])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert "torch sees no GPU; nothing was run" in capsys.readouterr().err
    assert not file.exists()


def test_steps_take_ten_minutes_at_most():
    beside = max(step.bound_s for step in STEPS if not step.alone)
    assert beside + sum(step.bound_s for step in STEPS if step.alone) <= 590
    assert sum(not step.alone for step in STEPS) == 6  # on 12 cores all beside each other
    assert len({step.name for step in STEPS}) == len(STEPS)


def test_a_step_beyond_its_bound_is_ended_and_failed():
    step = replace(STEPS[0], bound_s=1)
    result = run_step(step, ("--device", "cpu"), math.inf)
    assert result["rows"][-1]["status"] == "failed"
    assert result["rows"][-1]["error"] == "ended after its bound of 1 s"
    over = run_step(step, ("--device", "cpu"), 0.0)
    assert over["rows"] == [not_run(step.name, "the time of all steps is over")]


def test_an_error_is_a_row_after_those_before_it():
    def case():
        yield CPU.judged("first", True)
        raise ValueError("why")

    first, second = tried("case", case)
    assert first["status"] == "passed"
    assert (second["status"], second["error"]) == ("failed", "ValueError: why")


def test_without_numbers_a_row_has_none():
    stub = replace(CPU, numbers=False)
    assert stub.judged("check", False, error=1.0) == {"check": "check", "status": "ran"}
    assert stub.measured("check", seconds_s=1.0) == {"check": "check", "status": "ran"}


def test_tensors_of_another_kind_are_refused():
    x = torch.zeros(2, 1, 3)
    same_kind(x, x.as_strided((2, 1, 3), (3, 7, 1)), "one element has no stride")
    for other in (x.double(), torch.zeros(3, 1, 2).transpose(0, 2), torch.zeros(2, 3)):
        with pytest.raises(AssertionError, match="name: got"):
            same_kind(other, x, "name")


def test_a_small_wrong_gradient_fails():
    subject = compared("gpt", torch.float32, layers=1)
    model, inputs = subject.make(), subject.example(subject.shapes[0])
    plain = ran(model, model, inputs)
    assert judged(CPU, "right", torch.float32, plain, plain, plain)["status"] == "passed"
    wrong = copy.deepcopy(plain)
    wrong[1]["blocks.0.attention.q.weight"].mul_(1 + 1e-4)
    assert judged(CPU, "wrong", torch.float32, wrong, plain, plain)["status"] == "failed"
    del wrong[1]["head.weight"]
    with pytest.raises(AssertionError, match=r"head\.weight"):
        judged(CPU, "one is missing", torch.float32, wrong, plain, plain)


@pytest.mark.parametrize("name", ["causal, zigzag piece", "window, middle piece", "packed"])
def test_math_attention_is_torchs_with_a_mask_made_pair_by_pair(name):
    case = CASE[name]
    hides = case.tensor(torch.device("cpu"), torch.float64)
    seen = torch.zeros(case.queries, case.keys, dtype=torch.bool)
    for i in range(case.queries):
        turn = case.sight.get("turn", case.queries)
        at = i + case.sight.get("start", 0) if i < turn else i - turn + case.sight["second"]
        for j in range(case.keys):
            near = j >= at - case.sight.get("before", case.keys)
            alike = "segment" not in hides or hides["segment"][0, i] == hides["segment"][0, j]
            seen[i, j] = j <= at and near and alike
    q, k, v = (
        torch.randn(2, 4, n, 8, dtype=torch.float64) for n in (case.queries, case.keys, case.keys)
    )
    want = F.scaled_dot_product_attention(q, k, v, seen, scale=0.3)
    got = attention.math_attention(q, k, v, 0.3, case.sight, hides)
    torch.testing.assert_close(got, want)


def test_attention_that_sees_other_keys_fails(monkeypatch):
    case = CASE["causal, last piece"]
    monkeypatch.setattr(attention, "CASES", (case,))
    (row,) = attention.attention(CPU)
    assert row["status"] == "passed"
    assert row["kernels"]
    exact = attention.math_attention

    def off_by_one(q, k, v, scale, sight, hides):
        return exact(q, k, v, scale, {**sight, "start": sight["start"] - 1}, hides)

    monkeypatch.setattr(attention, "math_attention", off_by_one)
    (row,) = attention.attention(CPU)
    assert row["status"] == "failed"


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
        assert not any(
            {n: s for n, s in sizes.items() if n != BATCH} in subject.calibrated
            for sizes in subject.shapes
        )


def test_padding_and_packing_have_the_gradients_of_texts_one_by_one():
    texts = Texts((9, 33, 5, 20, 14), GPT_TINY.vocab_size)
    model = GPT(GPT_TINY).double()
    samples, gradients, losses = [0, 1, 2, 3, 4], [], []
    padded, packed = (kind(model, texts, 40, torch.device("cpu")) for kind in (Padded, Packed))
    assert padded.batches(samples) == [[1], [3, 4], [0, 2]]
    alone = Padded(model, texts, 1, torch.device("cpu"))  # no two fit
    for system in (alone, padded, packed):
        model.zero_grad()
        losses.append(system.run(samples))
        gradients.append([p.grad.clone() for p in model.parameters()])
    for loss, found in zip(losses[1:], gradients[1:], strict=True):
        assert loss == pytest.approx(losses[0], rel=1e-12)
        assert max(error(g, w) for g, w in zip(found, gradients[0], strict=True)) < 1e-12


def test_model_flops_are_torchs_count_and_half_the_pairs_of_attention():
    model = GPT(GPT_TINY)
    ids = torch.zeros(1, 50, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(ids, ids).backward()
    counts = counter.get_flop_counts()["Global"]
    matmuls = sum(n for op, n in counts.items() if "attention" not in str(op))
    attended = 3 * 4 * GPT_TINY.dim * GPT_TINY.n_layers * 50 * 51 / 2
    assert model_flops(model, [50]) == matmuls + attended


def _report(**changed):
    row = {"check": "a", "status": "measured", "seconds_s": 0.00123, "kernels": ["x", "y"]}
    step = {"name": "peaks", "about": "peaks of a GPT", "seconds_s": 3.0, "rows": [row]}
    return {
        "device": "NVIDIA H100", "gpu": True, "numbers": True, "date": "2026-11-26",
        "commit": "abc", "command": "python -m benchmarks.gpu_checks", "seconds_s": 3.0,
        "versions": {"torch": "2.11.0", "flash-attn": None}, "steps": [step], **changed,
    }  # fmt: skip


def test_page_holds_the_run_between_its_marks(tmp_path):
    text = page(_report())
    assert "### NVIDIA H100, 2026-11-26\n\nCommit abc, torch 2.11.0;" in text
    assert "| peaks of a GPT | 3 | 1 measured |" in text
    assert "| a | measured | 0.00123 | x, y |" in text
    file = tmp_path / "gpu.md"
    file.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write([_report()], file)
    write([_report()], file)
    assert file.read_text() == f"before\n{BEGIN}\n\n{text}\n{END}\nafter\n"


@pytest.mark.parametrize("changed", [{"gpu": False, "device": "CPU"}, {"numbers": False}])
def test_page_takes_no_figures_but_a_gpus(changed, tmp_path):
    file = tmp_path / "gpu.md"
    file.write_text("as it was")
    with pytest.raises(SystemExit, match="holds figures of a GPU"):
        write([_report(**changed)], file)
    assert file.read_text() == "as it was"


@pytest.mark.slow
def test_a_cpu_runs_all_of_it(tmp_path):
    file = tmp_path / "gpu.json"
    run = [sys.executable, "-m", "benchmarks.gpu_checks", "--device", "cpu", "--jobs", "1"]
    subprocess.run([*run, "--json", str(file)], check=True, timeout=580)
    report = json.loads(file.read_text())
    assert (report["gpu"], report["numbers"]) == (False, True)
    assert [step["name"] for step in report["steps"]] == [step.name for step in STEPS]
    for step in report["steps"]:
        left_out = [row["check"] for row in step["rows"] if row["status"] == "not run"]
        # The CPU may have no kernel for one way of attention; what needs a card is told exactly.
        assert len(left_out) == NEEDS.get(step["name"], 0) or step["name"] == "speeds", left_out
        assert all(row["status"] != "failed" for row in step["rows"])
