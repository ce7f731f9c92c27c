"""Which line of a model made a node."""

from torch import fx

from dcpc.fx.graphs import source_line


def test_source_line_passes_over_what_torch_generates():
    node = fx.Graph().placeholder("x")
    node.meta["stack_trace"] = (
        'File "/home/u/model.py", line 7, in forward\n    return f(x)\n'
        'File "<eval_with_key>.44", line 3, in forward\n    cos = ...\n'
    )
    assert source_line(node) == "u/model.py:7"
