"""Plans as JSON: read back as written, refused where stale, replayed."""

import dataclasses
import json
import re

import pytest
from typer.testing import CliRunner

from dcpc.buckets import Bucket
from dcpc.commands.cli import app
from dcpc.commands.replay import replay
from dcpc.errors import PlanError
from dcpc.ir import PlanRow
from dcpc.runtime.data.loader import DataLoader
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.planner.plan_file import PlanFile, plan_json, plan_of
from dcpc.runtime.planner.step_planner import Allowed, plan_step
from dcpc.runtime.planner.table import make_table
from tests.cases.fakes import RaggedWithDims, compiled_for

SHORT, LONG = Bucket.of({"seq": 8}), Bucket.of({"seq": 64})
ROWS = {
    SHORT: [PlanRow(1, 1, 0, 2.0), PlanRow(1, 4, 1, 6.0)],
    LONG: [PlanRow(1, 1, 2, 60.0), PlanRow(3, 1, 0, 24.0)],
}
SAMPLES = tuple((i, LONG if i == 3 else SHORT) for i in range(15))


def recorded(rows=ROWS) -> PlanFile:
    table = make_table(rows, 4)
    return PlanFile(plan_step(SAMPLES, table), table, Allowed(), SAMPLES)


def test_file_is_read_as_it_was_written(tmp_path):
    file = tmp_path / "plan.json"
    recorded().write(file)
    assert PlanFile.read(file) == recorded()


def swapped(plan):
    """The same micro-batches with one sample each of two of them exchanged."""
    micro_batches = list(plan.micro_batches)
    i, j = [k for k, mb in enumerate(micro_batches) if mb.bucket == SHORT][:2]
    a, b = (micro_batches[k].sample_ids for k in (i, j))
    micro_batches[i] = dataclasses.replace(micro_batches[i], sample_ids=(b[0], *a[1:]))
    micro_batches[j] = dataclasses.replace(micro_batches[j], sample_ids=(a[0], *b[1:]))
    return dataclasses.replace(plan, micro_batches=tuple(micro_batches))


def in_other_order(plan):
    """The same micro-batches on other ranks."""
    micro_batches = [
        dataclasses.replace(mb, ranks=tuple(sorted(3 - r for r in mb.ranks)))
        for mb in plan.micro_batches
    ]
    return dataclasses.replace(plan, micro_batches=tuple(micro_batches))


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (lambda plan: plan, "the same\n"),
        (swapped, "the same micro-batches; which samples of a bucket are in which differs\n"),
        (in_other_order, "other micro-batches, which take as long, "),
        (lambda plan: dataclasses.replace(in_other_order(plan), makespan_s=99.0), r"[\d.]+ s, -\d"),
    ],
    ids=["unchanged", "samples", "ranks", "slower"],
)
def test_replay_says_how_a_plan_made_now_differs(change, verdict):
    before = recorded()
    said = replay(dataclasses.replace(before, plan=change(before.plan)))
    assert re.search(f"planned again: {verdict}", said), said


def test_plan_of_another_table_is_refused():
    plan, now = recorded(), recorded({**ROWS, SHORT: ROWS[SHORT][:1]})
    data = json.loads(json.dumps(plan_json(plan.plan, plan.table)))
    assert plan_of(data, plan.table, "here") == plan.plan
    with pytest.raises(PlanError, match=f"here: got a plan made from plan table {plan.table.hash}"):
        plan_of(data, now.table, "here")
    with pytest.raises(PlanError, match=f"expected table {now.table.hash}"):
        replay(plan, now.table)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(version=99), "got plan version 99; expected 2"),
        (lambda d: d.pop("samples"), "got KeyError 'samples'; expected a plan that"),
        (lambda d: d["table"]["rows"][0].append([1, 9, 0, 1.0]), "made from plan table"),
        (lambda d: d["plan"]["micro_batches"][0].__setitem__(2, 9), "expected a row of the table"),
        (lambda d: d["plan"]["micro_batches"][0].__setitem__(1, 4), "expected a row of the table"),
    ],
)
def test_wrong_file_is_named(tmp_path, change, message):
    file = tmp_path / "plan.json"
    recorded().write(file)
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))
    with pytest.raises(PlanError, match=message):
        PlanFile.read(file)


def test_missing_file_and_text_that_is_no_json_are_named(tmp_path):
    with pytest.raises(PlanError, match="expected a plan file; name one"):
        PlanFile.read(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("hello")
    with pytest.raises(PlanError, match="got JSONDecodeError"):
        PlanFile.read(tmp_path / "text.json")


def test_loader_saves_a_step_and_dcpc_replays_it(tmp_path):
    groups = Groups(2, 0, global_ranks=(0, 1))
    compiled = compiled_for(groups, {4: (1, 3), 16: (2, 1)})
    loader = DataLoader(
        RaggedWithDims([4, 2, 16, 3, 9, 16]), compiled, tokens_per_step=99,
        pad={"input_ids": 0, "labels": -100},
    )  # fmt: skip
    (step,) = loader
    file = tmp_path / "step.json"
    loader.save_plan(step, file)
    done = CliRunner().invoke(app, ["replay", str(file)])
    assert done.exit_code == 0, done.output
    for part in (
        "6 samples in", "mode auto", "begin", "rank 1: busy", "lower bound", "what binds: work",
        "planned again: the same", "{seq: 16}, sp 2",
    ):  # fmt: skip
        assert part in done.output
    assert CliRunner().invoke(app, ["replay", str(tmp_path / "no.json")]).exit_code == 1
