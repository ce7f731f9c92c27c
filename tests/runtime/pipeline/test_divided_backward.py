"""A stage's backward in two parts: bytes between and during them, against tensors and allocator."""

import pytest
import torch

from dcpc.compiled.pipeline.cut import nbytes
from examples.allocator import allocated
from tests.cases.stages import CASES, cut_model

SIZES = {
    "gpt_tied": {"batch": 3, "seq": 37},
    "t5": {"batch": 3, "source": 31, "target": 24},
}
SCALARS_BYTES = 24  # a loss and its gradient, and an op that makes tensors of Python scalars


def storages(values):
    found = (v.untyped_storage() for v in values if isinstance(v, torch.Tensor))
    return {storage.data_ptr(): storage.nbytes() for storage in found}


@pytest.fixture(scope="module", params=SIZES)
def cut(request):
    model, stages = cut_model(CASES[request.param], 2)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)  # gradients are then added in place
    sizes = SIZES[request.param]
    return stages, sizes, CASES[request.param].data(sizes, 0)


@pytest.mark.parametrize("share", [0, pytest.param(0.5, marks=pytest.mark.slow), 1])
def test_bytes_are_those_of_the_profile(cut, share):
    stages, sizes, inputs = cut
    sent = ()
    for stage in stages:
        received = sent
        stage = stage.recomputing(round(share * stage.study(sizes).steps))
        sent, _ = stage.forward(inputs, received)
        gradients = tuple(torch.ones_like(x) if x.is_floating_point() else None for x in sent)

        def first_part(stage=stage, received=received, gradients=gradients):
            return stage.backward_input(stage.forward(inputs, received)[1], gradients)

        told, ran = stage.parts(sizes), allocated(first_part)
        rest = storages(ran.result[1].values)
        known = storages([*stage.runnable.traced.tensors().values()])
        assert told.weight_bytes == sum(size for key, size in rest.items() if key not in known)
        assert {type(x) for x in ran.result[1].values} <= {torch.Tensor, int}, "none is hidden"
        # The gradients of what was sent are made before.
        given = sum(map(nbytes, stage.sent(sizes)))
        assert told.input_bytes - given == pytest.approx(ran.peak_bytes, abs=SCALARS_BYTES)
        assert told.weight_bytes <= told.work_bytes <= told.input_bytes
        assert 0 < told.weight_s < stage.predict(sizes).seconds_s / 2
        whole = allocated(lambda: stage.backward_weight(first_part()[1]))  # noqa: B023
        assert whole.peak_bytes == ran.peak_bytes, "the second part needs less"
