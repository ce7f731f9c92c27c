"""nn.LSTM, nn.GRU and nn.RNN: they draw numbers for a dropout between their layers alone."""

import warnings

import pytest
import torch
from torch import nn

import dcpc
from dcpc.errors import TraceError
from dcpc.trace import trace
from tests.cases.exactness import compiled_error

ONE_LENGTH = {"x": "float64[batch, 7, 8]"}


class Recurrent(nn.Module):
    def __init__(self, kind, **settings):
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.rnn = kind(8, 4, batch_first=True, bidirectional=True, **settings)

    def forward(self, x):
        out, state = self.rnn(self.lin(x))
        return (out - x).square().mean() + state[0].square().mean()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (nn.LSTM, {"num_layers": 2}),
        (nn.RNN, {"dropout": 0.3}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (nn.LSTM, {"dropout": 0.3}),
                (nn.GRU, {"dropout": 0.3}),
                (nn.GRU, {"num_layers": 2}),
                (nn.RNN, {"num_layers": 2}),
            )
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:dropout option adds dropout")
def test_recurrent_layers_run_where_nothing_is_dropped_between_them(kind, settings):
    torch.manual_seed(0)
    model = Recurrent(kind, **settings).double()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="forward changes its own module")
        compiled = dcpc.compile(
            model, dcpc.Buckets(ONE_LENGTH, [{}]), backend="eager", sp=1, verify="off"
        )
    x = torch.randn(3, 7, 8, dtype=torch.float64)
    assert compiled_error(compiled, model, {"x": x}) < 1e-10


def test_recurrent_layers_with_dropout_or_of_many_lengths_are_refused():
    model = Recurrent(nn.LSTM, num_layers=2, dropout=0.3).double()
    with pytest.raises(TraceError, match="no dropout between them"):
        trace(model, dcpc.Buckets(ONE_LENGTH, [{}]))
    with pytest.raises(TraceError, match=r"recurrent layer \(rnn\) step by step"):
        trace(model.eval(), dcpc.Buckets({"x": "float64[batch, n, 8]"}, [{"n": 5}, {"n": 9}]))
