"""Which line of a model made a node."""

from torch import fx

import dcpc
from dcpc.fx.large_graphs import source_line


def test_source_line_passes_over_what_torch_generates():
    node = fx.Graph().placeholder("x")
    node.meta["stack_trace"] = (
        'File "/home/u/model.py", line 7, in forward\n    return f(x)\n'
        'File "<eval_with_key>.44", line 3, in forward\n    cos = ...\n'
    )
    assert source_line(node) == "u/model.py:7"


def test_source_line_is_no_line_of_dcpcs_own_and_may_be_in_no_file():
    node = fx.Graph().placeholder("x")
    own = f'File "{dcpc.errors.__file__}", line 9, in forward\n    self.returned()\n'
    node.meta["stack_trace"] = own
    assert source_line(node) == ""
    node.meta["stack_trace"] = own + 'File "<stdin>", line 3, in forward\n'
    assert source_line(node) == "<stdin>:3"
