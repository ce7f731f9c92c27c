"""What a block writes to, seen below autograd."""

import torch

from dcpc.fx.writes import WriteLog


def test_writes_through_views_and_data_are_noted():
    first, second, third, read = (torch.zeros(3, requires_grad=True) for _ in range(4))
    with WriteLog() as log, torch.no_grad():
        torch.nn.init.ones_(first)
        second.data[1:].fill_(2.0)
        torch.add(read, 1.0, out=third.detach())
    places = [t.untyped_storage().data_ptr() in log.places for t in (first, second, third, read)]
    assert places == [True, True, True, False]
    assert second.tolist() == [0.0, 2.0, 2.0]
    assert log.meta_shapes == []


def test_writes_to_the_meta_device_are_noted_by_shape():
    lost = torch.zeros(2, 3, device="meta")
    with WriteLog() as log:
        lost.mul(2.0)
        assert log.meta_shapes == []
        lost[0].zero_()
    assert log.meta_shapes == [(3,)]
