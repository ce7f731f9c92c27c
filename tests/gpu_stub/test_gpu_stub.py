"""dcpc on a GPU that computes nothing: what it captures, plans, lowers and compiles there.

Shapes, strides, dtypes and devices of what comes out are asserted by the checks themselves, as are
gradients that are missing; numbers are not compared, as there are none.
"""

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.gpu_stub.build import build
from tests.gpu_stub.run import PYTHON, ROOT, card, is_there

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not is_there(),
        reason=f"there is no {PYTHON}: make gpu-stub TORCH=2.14.1 installs a CUDA build of torch "
        "there, make gpu-stub GPU_STUB_PYTHON=/path/to/python takes one that is at hand",
    ),
]


def run(folder: Path, *command: str) -> str:
    """Returns what a module prints, run with the card; its caches are in the folder."""
    caches = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    made = card() | {name: str(folder / below) for name, below in caches.items()}
    found = subprocess.run(
        [PYTHON, "-m", *command], env=made, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, f"{found.stdout[-3000:]}\n{found.stderr[-3000:]}"
    return found.stdout


def checked(folder: Path, *steps: str) -> dict[str, list[dict]]:
    """Returns the rows of steps of the checks, none of which failed."""
    file = folder / "checks.json"
    options = ["--device", "cuda", "--no-numbers", "--quick", "--jobs", "1", "--json", str(file)]
    run(folder, "benchmarks.gpu_checks", *options, "--only", ",".join(steps))
    report = json.loads(file.read_text())
    assert not report["numbers"]
    assert report["device"] == "NVIDIA H100 80GB HBM3 (a stub)"
    found = {step["name"]: step["rows"] for step in report["steps"]}
    assert found.keys() == {*steps}
    ended = {row["status"] for rows in found.values() for row in rows}
    assert ended <= {"ran", "passed", "not run"}
    return found


def test_each_attention_runs_the_kernel_that_it_is_to(tmp_path):
    rows = {row["check"]: row["kernels"] for row in checked(tmp_path, "attention")["attention"]}
    flash = ["_flash_attention_backward", "_flash_attention_forward"]
    pieces = ("causal, last piece", "causal, zigzag piece", "window, middle piece")
    for case in ("causal", "causal, grouped heads", *pieces):
        for dtype in ("bfloat16", "float16"):
            assert rows[f"{case}, {dtype}, width 64"] == flash, case
    efficient = ["_efficient_attention_backward", "_efficient_attention_forward"]
    assert rows["causal, float32, width 64"] == efficient
    assert rows["hidden keys, bfloat16, width 64"] == []  # blocks


def test_variants_of_a_gpt_run_and_inductor_makes_code_for_the_card(tmp_path):
    rows = checked(tmp_path, "exact_gpt")["exact_gpt"]
    assert [row["check"] for row in rows if row["status"] == "not run"] == [
        "gpt, float32, inductor"
    ]
    assert len(rows) == 3 + 1 + 3 + 1  # float32 and bfloat16: shares of recompute, Inductor
    assembled = [*tmp_path.glob("triton/**/*.ptx")]
    assert assembled
    assert all(".target sm_90" in file.read_text() for file in assembled)
    assert len([*tmp_path.glob("triton/**/*.cubin")]) == len(assembled)  # ptxas took each


def test_variants_of_a_video_model_run(tmp_path):
    rows = checked(tmp_path, "exact_stdit")["exact_stdit"]
    assert sum(row["status"] == "ran" for row in rows) == 6


def test_two_ranks_train_on_the_card(tmp_path):
    assert [row["status"] for row in checked(tmp_path, "sp2")["sp2"]] == ["ran"] * 3


def test_peaks_of_a_billion_parameters_are_those_of_torchs_allocator(tmp_path):
    rows = [row for row in checked(tmp_path, "peaks")["peaks"] if "predicted_bytes" in row]
    assert [row["status"] for row in rows] == ["passed"] * 12  # four lengths, three of recompute
    for row in rows:  # the allocator cuts blocks of up to 1 MiB more
        assert row["requested_bytes"] == pytest.approx(row["predicted_bytes"], rel=1e-4)


def test_the_other_measurements_run(tmp_path):
    rows = checked(tmp_path, "pyramid", "compiled")
    peaks = [row for row in rows["pyramid"] if "predicted_bytes" in row]
    assert [row["status"] for row in peaks] == ["passed"] * 4
    assert [row["status"] for row in rows["compiled"]] == ["ran"]


def test_mixed_lengths_train_beside_padding_and_packing(tmp_path):
    rows = checked(tmp_path, "mixed")["mixed"]
    assert sum(row["status"] == "ran" for row in rows) == 10


def test_a_step_reads_zeros_and_ends_well_while_torchs_autograd_thread_works(tmp_path):
    rows = tmp_path / "rows"
    options = ["--device", "cuda", "--no-numbers", "--step", "ending", "--rows", str(rows)]
    run(tmp_path, "tests.benchmarks.ending_step", *options)
    assert json.loads(rows.read_text())["status"] == "ran"


def test_two_builds_at_once_hide_no_library(tmp_path):
    folder = tmp_path / "stub"
    libraries = [Path(build(PYTHON, folder)["LD_PRELOAD"]), folder / "libcuda.so.1"]
    whole = {library: library.stat().st_size for library in libraries}
    with ThreadPoolExecutor() as pool:
        built = pool.submit(build, PYTHON, folder)
        while not built.done():
            assert {library: library.stat().st_size for library in libraries} == whole
    built.result()
    assert len([*folder.iterdir()]) == 4  # two libraries and two names


def test_models_train_with_each_option_on_the_card(tmp_path):
    found = json.loads(run(tmp_path, "tests.gpu_stub.options").splitlines()[-1])
    assert len(found) == 20 + 2 * 8
    assert {name: error for name, error in found.items() if error} == {}


def test_plans_for_a_gpu_are_the_same_on_it_and_on_a_cpu(tmp_path):
    plans = json.loads(run(tmp_path, "tests.gpu_stub.plans").splitlines()[-1])
    assert plans["cuda"] == plans["cpu"]
    assert any(bucket["menu_step"] for bucket in plans["cuda"]["stdit"])
    assert all(bucket["peak_bytes"] for bucket in plans["cuda"]["gpt"])
