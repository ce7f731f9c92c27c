"""What the loader says of arguments that are not of their kind."""

import pytest
import torch

from dcpc.errors import DataError
from dcpc.runtime.data.loader import DataLoader
from dcpc.runtime.groups.groups import Groups
from tests.cases.fakes import RaggedWithDims, compiled_for


def loader_for(dataset, **options) -> DataLoader:
    return DataLoader(dataset, compiled_for(Groups(), {4: (1, 1)}), tokens_per_step=4, **options)


@pytest.mark.parametrize(
    ("dataset", "got"), [((x for x in ()), "generator"), (3, "int"), ({1, 2}, "set")]
)
def test_what_has_no_samples_by_number_is_refused(dataset, got):
    with pytest.raises(DataError, match=rf"dataset: got {got}; expected samples by number"):
        loader_for(dataset)


def test_what_is_not_compiled_is_refused():
    with pytest.raises(DataError, match=r"compiled: got Linear; expected what dcpc.compile"):
        DataLoader([1], torch.nn.Linear(1, 1), tokens_per_step=4)


@pytest.mark.parametrize("pad", [0, -100, "labels"])
def test_pad_that_names_no_inputs_is_refused(pad):
    with pytest.raises(DataError, match=r"pad=: got .*; expected input name -> value"):
        loader_for(RaggedWithDims([4]), pad=pad)


def test_weight_that_is_neither_a_name_nor_a_function_is_refused():
    with pytest.raises(DataError, match=r"weight=: got 3; expected 'samples', an input"):
        loader_for(RaggedWithDims([4]), weight=3)
