"""What the house weighs only falls: lower a number here with the change that lowers it."""

import pytest

from tests.house import COUNTS, House, table
from tests.house_aims import AIMS

HOUSE = House()
# Capability that joined since the cap was set -> lines in dcpc/ it may cost; each only falls, too.
# An entry is argued in its commit: what users get, and which mechanism it is.
JOINED: dict[str, int] = {
    "seen while it trains: timeline of all ranks, console, table; streams in the Trainer": 300,
    "autograd functions of the model": 500,
    'batch norms that train: batch_norm="micro"': 441,
    "commands take --loss for a model that returns something else; typos told at once": 66,
    "dims that forward takes for numbers: static, a trace a length; so in check, calibrate": 256,
    "mixtures of experts: grouped products priced, each rank sorts its own tokens": 295,
    "CTC losses: one op, whose saved values have sizes made of dims": 200,
    "told at once: an epoch before the resumed one; no floats behind torch.compile": 10,
    "texts without images: a dim of 0 has a trace of its own; an input may be lacking": 49,
    "ops of other libraries are priced by the calls that their kernels make": 164,
    "forward may compare type(x) with torch.Tensor": 26,
    "rotary tables are made once a call, which Inductor made in every layer's kernels": 54,
    "train_step adds up micro-batches; calls look up tensors and shapes in less Python": 88,
    "models that check values and raise, as transformers' speech models do": 95,
    "logits and MLPs some rows at a time: an op whose graphs are a program's": 1_237,
    "plan files of packed rows; micro-batches in parts of like length where these take less": 37,
    "saved values of long buckets wait in the host's memory or on a disk, bits as they were": 1_139,
    "a packed step's plan goes on getting better: its groups changed one by one (evolve)": 281,
    "fast paths on values: the side that is right for all, by the plain model": 300,
    "rows that a mask chose, without sizes that depend on values; masked_scatter is split": 440,
    "integers that forward makes of numbers alone have values in a trace": 102,
    "placements whose tables grow too large: a variable is held at each of its labels": 53,
    "errors show the user's own lines, dims by name, and the value that was meant": 77,
    "parameters and the optimizer's state beyond the device; units stay where there is room": 679,
    "the least that must leaves, in forward's order; a dead store's thread is named": 98,
    "recovery from out-of-memory tries tiles before a wider group": 49,
    "the Trainer refuses checkpoints beside away='parameters' up front": 4,
    "calibration: what launches and the rest change by, told apart": 21,
    "of placements that cost at most 1% more than the least, one that sends less": 100,
    "transformers' Trainer takes pipeline=, parameters= and their checkpoints": 230,
    "parameters that are given other memory train on": 43,
    "steps and results print as a line, ranks that do not come are named, padding is told": 40,
    "a line where Inductor compiles for long: what takes the time, and where it is kept": 26,
}
# Benchmark of a capability that joined -> its lines in benchmarks/.
MEASURED: dict[str, int] = {"tiles": 112, "away": 473, "both": 44, "tiers": 239}
MOST = {
    "lines in dcpc/": 76_291 + sum(JOINED.values()),
    "lines in benchmarks/": 9_810 + sum(MEASURED.values()),
    "methods of CompiledModel": 12,
    "methods of PipelinedModel": 12,
    "functions > 50 lines": 10,
    "functions of >= 9 parameters": 7,
    "classes > 12 methods": 30,
    "class names that differ by an underscore": 0,
    "class names that differ by a plural": 1,
    "file names that repeat": 15,
    'docstrings whose first sentence needs "what"': 8,
    'argument texts that begin with "of"': 1,
}


@pytest.mark.parametrize("figure", COUNTS)
def test_figure_has_not_grown(figure):
    assert COUNTS[figure](HOUSE) <= MOST[figure], "python -m tests.house prints all of them"


def test_each_aim_that_is_missed_has_its_reason():
    assert {*AIMS} == {*COUNTS}
    assert all(why or COUNTS[name](HOUSE) <= aim for name, (aim, why) in AIMS.items())


ONE = '''"""Returns what."""


class Base:
    def f(self): ...
'''
OTHER = '''class _Base: ...


class CompiledModel(Base):
    """Runs.

    Args:
        x: of it.
        y: tensor of it.
    """
    def f(self): ...
    def g(self): ...
'''


def test_figures_are_counted(tmp_path):
    (tmp_path / "dcpc" / "some").mkdir(parents=True)
    (tmp_path / "dcpc" / "a.py").write_text(ONE)
    (tmp_path / "dcpc" / "some" / "a.py").write_text(OTHER)
    found = {name: count(House(tmp_path)) for name, count in COUNTS.items()}
    assert found == {
        **dict.fromkeys(COUNTS, 0),
        "lines in dcpc/": 17,
        "methods of CompiledModel": 2,
        "class names that differ by an underscore": 1,
        "file names that repeat": 1,
        'docstrings whose first sentence needs "what"': 1,
        'argument texts that begin with "of"': 1,
    }
    assert ("methods of CompiledModel", "2 on 2 levels") in table(House(tmp_path))
