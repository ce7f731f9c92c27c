"""The tensors that a traced graph is run with."""


def values(program, model, inputs):
    """The tensors of a graph's placeholders."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    given = {n: state[t] for n, t in (program.parameters | program.buffers).items()}
    given |= program.constants | {n: inputs[i] for n, i in program.inputs.items()}
    return [given[n.name] for n in program.gm.graph.find_nodes(op="placeholder")]
