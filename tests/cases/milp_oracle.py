"""The minimum of a cost network by integer programming: slow, independent of dcpc's own solver."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

Costs = npt.NDArray[np.float64]


def milp_minimum(unaries: Sequence[Costs], edges: Iterable[tuple[int, int, Costs]]) -> float:
    """Return the least total cost, inf if nothing is feasible.

    The local polytope with integral labels: one 0/1 variable a label, one in [0, 1] an edge and
    pair of labels. Those of a variable sum to 1, those of an edge to the label along rows and
    columns.

    Args:
        unaries: costs of the labels, shape (labels,) each; inf forbids.
        edges: (u, v, table), table of shape (labels of u, labels of v); inf forbids.

    Raises:
        RuntimeError: the solver stopped before it had proved its result.
    """
    edges = list(edges)
    sizes = [len(unary) for unary in unaries]
    starts = np.cumsum([0, *sizes, *(table.size for _, _, table in edges)])
    costs = np.concatenate([*unaries, *(table.ravel() for _, _, table in edges)])
    labels = int(starts[len(sizes)])
    triples: list[tuple[int, int, int]] = []  # (constraint, column, coefficient)
    targets: list[int] = []
    for v, size in enumerate(sizes):
        triples += [(len(targets), int(starts[v]) + i, 1) for i in range(size)]
        targets.append(1)
    for (u, v, table), start in zip(edges, starts[len(sizes) :], strict=False):
        cells = int(start) + np.arange(table.size).reshape(table.shape)
        for variable, lines in ((u, cells), (v, cells.T)):
            for i, line in enumerate(lines):
                triples += [(len(targets), int(cell), 1) for cell in line]
                triples.append((len(targets), int(starts[variable]) + i, -1))
                targets.append(0)
    rows, columns, coefficients = np.array(triples).T
    result = milp(
        np.where(np.isinf(costs), 0.0, costs),
        integrality=np.arange(len(costs)) < labels,
        bounds=Bounds(0, np.where(np.isinf(costs), 0.0, 1.0)),
        constraints=LinearConstraint(
            coo_array((coefficients, (rows, columns)), shape=(len(targets), len(costs))).tocsr(),
            targets,
            targets,
        ),
        options={"mip_rel_gap": 0.0},
    )
    if result.status == 2:
        return inf
    if result.status != 0:
        raise RuntimeError(f"milp stopped without a proved optimum: {result.message}")
    return float(result.fun)
