"""The costs of a step's micro-batches on each stage, as the search for a schedule asks for them."""

from __future__ import annotations

from collections.abc import Sequence

from dcpc.buckets import Sizes
from dcpc.compiled.pipeline.cut import handed_on_bytes, nbytes, passed_on_bytes
from dcpc.compiled.pipeline.divided import PartCosts
from dcpc.compiled.pipeline.model_stage import ModelStage, StageState
from dcpc.compiled.pipeline.stage_costs import StageDevice
from dcpc.compiled.pipeline.stages import ProgramStage
from dcpc.runtime.pipeline.schedule import Hop, PipelineWork, StageCost


def pipeline_work(
    settings: Sequence[Sequence[ModelStage]], sizes: Sequence[Sizes], devices: Sequence[StageDevice]
) -> PipelineWork:
    """Returns the costs of micro-batches on the stages of a pipeline.

    Args:
        settings: copies of each stage, one for each setting of recompute, the fastest first.
        sizes: lengths of each micro-batch.
        devices: device of each stage.
    """
    pairs = list(zip(settings, devices, strict=True))
    costs = [
        tuple(tuple(_cost(stage.at(each), each, device) for stage in row) for each in sizes)
        for row, device in pairs
    ]
    hops = [tuple(_hop(row[0].at(each), each) for each in sizes) for row in settings[:-1]]
    states = (StageState.of(row[0].by_trace, d.optimizer) for row, d in pairs)
    room = [d.memory_bytes - s.resident_bytes for (_, d), s in zip(pairs, states, strict=True)]
    return PipelineWork(tuple(costs), tuple(hops), tuple(room))


def _cost(stage: ProgramStage, sizes: Sizes, device: StageDevice) -> StageCost:
    """Returns the seconds and bytes of a micro-batch on a stage with its recompute.

    What it sends is in none of its bytes once forward has ended: the schedule has it until it is
    taken. What is sent back to it is: the gradient of a value that it hands on as well, of which
    a backward in one part makes a copy.
    """
    found, study = stage.predict(sizes), stage.study(sizes)
    live = study.live(stage.menu_step, sizes)
    turn = next(i for i, (name, _) in enumerate(live) if name == "backward")
    given_bytes = found.input_bytes + handed_on_bytes(stage, sizes)
    held_bytes = found.saved_bytes + found.shared_bytes
    forward_bytes = max((n for _, n in live[:turn]), default=0)
    backward_bytes = max(n for _, n in live[turn:]) - found.returned_bytes
    passed_bytes, back_bytes = passed_on_bytes(stage, sizes)
    parts = stage.parts(sizes) or PartCosts(0.0, 0, 0, 0, 0)
    return StageCost(
        forward_s=found.forward_s / device.speed,
        backward_s=(found.seconds_s - found.forward_s) / device.speed,
        weight_s=parts.weight_s / device.speed,
        held_bytes=held_bytes + given_bytes,
        forward_bytes=max(forward_bytes, held_bytes + found.returned_bytes) + given_bytes,
        backward_bytes=backward_bytes + given_bytes + 2 * back_bytes,
        weight_bytes=parts.weight_bytes,
        input_bytes=parts.input_bytes + given_bytes + back_bytes,
        work_bytes=parts.work_bytes,
        sent_held_bytes=found.shared_bytes + passed_bytes,
        back_kept_bytes=parts.shared_bytes,
    )


def _hop(stage: ProgramStage, sizes: Sizes) -> Hop:
    """Returns the costs of sending a micro-batch to the next stage, and its gradients back."""
    sent_bytes = sum(map(nbytes, stage.sent(sizes)))
    back_bytes = sum(
        nbytes(shaped)
        for shaped, learns in zip(stage.sent(sizes), stage.sends_learning, strict=True)
        if learns
    )
    link = stage.runnable.traced.device.link(2 * stage.sp)
    return Hop(
        forward_s=link.alpha_s + sent_bytes / link.bytes_per_s,
        backward_s=link.alpha_s + back_bytes / link.bytes_per_s,
        forward_bytes=sent_bytes,
        backward_bytes=back_bytes,
    )
