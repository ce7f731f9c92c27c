"""A model in stages as text: the parameters, seconds and memory of each stage."""

from __future__ import annotations

from collections.abc import Sequence

from dcpc.buckets import Bucket
from dcpc.compiled.pipeline.model_stage import ModelStage, StageState, shared_parameters
from dcpc.compiled.pipeline.stages import ProgramStage
from dcpc.compiled.pipeline.trained.cutting import CutModel
from dcpc.symbolic_profile import bytes_text, seconds_text


def stages_report(cut: CutModel, pipelines: int) -> str:
    """Returns a table of the stages, the tied parameters, and how far the cut may be off."""
    stages, planner = cut.plan.stages, cut.planner
    lines = [
        f"{pipelines} pipelines of {len(stages)} stages{_ranks(cut)}; each bucket as likely as any "
        f"other{_traces(stages)}",
        "",
        "  stage  calls  parameters and state  most needed  recompute  a sample takes",
    ]
    own = zip(stages, planner.cost.devices, strict=True)
    resident_bytes = [StageState.of(s.by_trace, d.optimizer).resident_bytes for s, d in own]
    for stage in stages:
        seconds = ", ".join(_seconds(cut, stage, n, b) for n, b in enumerate(planner.buckets))
        steps = "/".join(map(str, sorted(set(cut.plan.menu_steps[stage.index]))))
        lines.append(
            f"  {stage.index:>5}  {'/'.join(map(str, map(_calls, stage.by_trace))):>5}  "
            f"{bytes_text(resident_bytes[stage.index]):>20}  "
            f"{bytes_text(cut.plan.needed_bytes[stage.index]):>11}  {steps:>9}  {seconds}"
        )
    bound_s = cut.plan.cut.bound_s
    lines += [
        "",
        f"the slowest stage takes {seconds_text(cut.plan.cut.expected_s)} in the mean of the "
        f"buckets; no cut less than {seconds_text(bound_s)}",
    ]
    lines += [_tied(name, readers) for name, readers in shared_parameters(stages).items()]
    return "\n".join(lines) + "\n"


def _traces(stages: Sequence[ModelStage]) -> str:
    """Returns the order of the traces in a table's cell, where there are several."""
    each = [*stages[0].programs]
    if len(each) == 1:
        return ""
    said = (", ".join(f"{n} is {s}" for n, s in sorted(fixed)) or "no dim is 1" for fixed in each)
    return f"; calls where {' / '.join(said)}"


def _ranks(cut: CutModel) -> str:
    """Returns the ranks that run the stages, where these are not one each, in order."""
    layout = cut.layout
    text = f" of {layout.sp} ranks" * (layout.sp > 1)
    if layout.order != tuple(range(layout.stages)):
        firsts = ", ".join(str(layout.rank(0, stage)) for stage in range(layout.stages))
        text += f" on ranks {firsts}"
    return text


def _calls(stage: ProgramStage) -> int:
    return sum(n.op == "call_function" for n in stage.part.program.gm.graph.nodes)


def _seconds(cut: CutModel, stage: ModelStage, number: int, bucket: Bucket) -> str:
    cost = cut.planner.cost.options(stage.index, 1, number)[0]
    return f"{bucket} {seconds_text(cost.forward_s + cost.backward_s)}"


def _tied(name: str, readers: Sequence[int]) -> str:
    which = " and ".join(map(str, readers))
    return f"{name} is on stages {which}; its gradient is the sum of theirs"
