"""A fixed slice of random programs, and every program that was ever found wrong."""

import importlib.util
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dcpc.codegen.collectives.lockstep_collectives import COLLECTIVES
from tests.fuzz.generate import generate
from tests.fuzz.judge import Setting, judge, settings
from tests.fuzz.program import relaid, seeded
from tests.fuzz.run import outcome
from tests.fuzz.shrink import shrink

QUICK, EACH, LAST = 21, 63, 504  # of the seeds some are void
# The first part is quick; the others run in `make test-exact`.
PARTS = [range(QUICK)] + [range(n, min(n + EACH, LAST)) for n in range(QUICK, LAST, EACH)]
STEPS = 2
EVERYWHERE = (
    Setting(1, "auto", "none"), Setting(1, "auto", "some"), Setting(2, "ring", "all"),
    Setting(3, "auto", "some"), Setting(4, "hybrid", "none"),
)  # fmt: skip
ops = torch.ops.dcpc
CASES = sorted((Path(__file__).parent / "cases").glob("*.py"))


@pytest.mark.parametrize(
    "seeds", [pytest.param(p, marks=[pytest.mark.slow][p is PARTS[0] :], id=str(p)) for p in PARTS]
)
def test_random_programs_have_the_plain_models_numbers(seeds):
    wrong, counts = [], {"right": 0, "refused": 0, "void": 0}
    for seed in seeds:
        program = generate(seed, STEPS)
        program = replace(program, points=program.points[-2:])
        tried = random.Random(seed).sample(settings(random.Random(seed), 1), 1)
        found = outcome(program, tried, seed)
        counts[found.kind] = counts.get(found.kind, 0) + 1
        if found.kind in ("wrong", "crash"):
            wrong.append(f"seed {seed}: {found.kind}: {found.text}\n{program.module_source()}")
    assert not wrong, f"{len(wrong)} of {len(seeds)}; the first:\n{wrong[0]}"
    assert counts["refused"] <= 0.08 * len(seeds), counts
    assert counts["void"] <= 0.04 * len(seeds), counts


def loaded(file):
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("file", CASES, ids=lambda file: file.stem)
def test_programs_that_were_wrong_are_right(file, request):
    """A case may be refused if it says so (REFUSED); OPEN says what is not mended yet."""
    case = loaded(file)
    if hasattr(case, "OPEN"):
        request.applymarker(pytest.mark.xfail(reason=case.OPEN, strict=True))
    layout = getattr(case, "LAYOUT", "")
    model = relaid(seeded(case.Model), layout)
    found = judge(model, case.INPUTS, case.POINTS, EVERYWHERE, layout=layout)
    allowed = {"right", "refused"} if hasattr(case, "REFUSED") else {"right"}
    assert found.kind in allowed, found.text


def test_a_program_is_the_same_at_every_call():
    assert generate(7) == generate(7)
    assert generate(7) != generate(8)


def test_a_shrunk_program_keeps_what_makes_it_fail():
    program = next(p for p in map(generate, range(100)) if "cumsum" in p.module_source())

    def fails(p):
        return "cumsum" in p.module_source()

    small = shrink(program, fails)
    assert fails(small)
    assert len(small.steps) <= len(program.steps)
    assert len(small.terms) == len(small.points) == 1


def faulty(dims_seen, *, wrong):
    """A collective's result, wrong by one element of one rank or not made at all."""

    def meet(calls):
        if not wrong:
            raise KeyError("x")
        results = [r.clone() for r in dims_seen(calls)]
        results[-1].view(-1)[0] += 1e-6
        return results

    return meet


@pytest.mark.parametrize(("wrong", "kind"), [(True, "wrong"), (False, "crash")])
def test_the_judge_sees_a_rank_with_another_number_and_a_crash(monkeypatch, wrong, kind):
    program, tried = generate(1, STEPS), [Setting(2, "auto", "none")]
    assert outcome(program, tried, 0).kind == "right"
    for op in (ops.all_reduce.default, ops.all_gather.default, ops.reduce_scatter.default):
        monkeypatch.setitem(COLLECTIVES, op, faulty(COLLECTIVES[op], wrong=wrong))
    assert outcome(program, tried, 0).kind == kind
