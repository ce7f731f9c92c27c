"""The exact minimiser against brute force and against integer programming."""

from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpc.errors import PlanError
from dcpc.passes.placement.elimination import CostNetwork, Solution
from tests.cases.milp_oracle import milp_minimum

Edge = tuple[int, int, np.ndarray]
COSTS = st.one_of(st.integers(-4, 4).map(float), st.just(inf), st.floats(0, 1))


def network(unaries: list[np.ndarray], edges: list[Edge], **limits: int) -> CostNetwork:
    problem = CostNetwork(**limits)
    for i, unary in enumerate(unaries):
        problem.add_variable(f"x{i}", unary)
    for u, v, table in edges:
        problem.add_edge(u, v, table)
    return problem


def cost_at(unaries: list[np.ndarray], edges: list[Edge], labels: tuple[int, ...]) -> float:
    total = sum(float(unary[labels[v]]) for v, unary in enumerate(unaries))
    return total + sum(float(table[labels[u], labels[v]]) for u, v, table in edges)


def brute_force(unaries: list[np.ndarray], edges: list[Edge]) -> float:
    """The least cost of all labels at once: an axis for each variable."""
    count, total = len(unaries), np.zeros(())

    def along(table: np.ndarray, *axes: int) -> np.ndarray:
        ordered = table if [*axes] == sorted(axes) else table.T
        sizes = dict(zip(sorted(axes), ordered.shape, strict=True))
        return ordered.reshape([sizes.get(axis, 1) for axis in range(count)])

    for v, unary in enumerate(unaries):
        total = total + along(unary, v)
    for u, v, table in edges:
        total = total + along(table, u, v)
    return float(total.min())


Shape = tuple[list[int], list[tuple[int, int]]]  # labels of each variable, and edges


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Up to 6 variables of 1 to 3 labels; some isolated, some pairs with several edges."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
    pairs = [(u, v) for u in range(len(sizes)) for v in range(len(sizes)) if u != v]
    return sizes, draw(st.lists(st.sampled_from(pairs), max_size=14)) if pairs else []


@st.composite
def tiny_networks(draw: st.DrawFn) -> tuple[list[np.ndarray], list[Edge]]:
    sizes, pairs = draw(shapes())

    def array(*shape: int) -> np.ndarray:
        count = int(np.prod(shape))
        return np.array(draw(st.lists(COSTS, min_size=count, max_size=count))).reshape(shape)

    return [array(n) for n in sizes], [(u, v, array(sizes[u], sizes[v])) for u, v in pairs]


def random_network(
    seed: int, density: float, inf_share: float
) -> tuple[list[np.ndarray], list[Edge]]:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 5, size=rng.integers(10, 15)).tolist()

    def array(*shape: int) -> np.ndarray:
        return np.where(rng.random(shape) < inf_share, inf, rng.integers(0, 50, shape) / 8)

    pairs = [(u, v) for u in range(len(sizes)) for v in range(u) if rng.random() < density]
    return [array(n) for n in sizes], [(u, v, array(sizes[u], sizes[v])) for u, v in pairs]


def cases_of(several: list[tuple[list[np.ndarray], list[Edge]]]) -> CostNetwork:
    """Returns networks of one shape as the cases of one."""
    problem = CostNetwork(cases=len(several))
    unaries, edges = zip(*several, strict=True)
    for i, unary in enumerate(zip(*unaries, strict=True)):
        problem.add_variable(f"x{i}", np.stack(unary, axis=-1))
    for edge in zip(*edges, strict=True):
        u, v, _ = edge[0]
        problem.add_edge(u, v, np.stack([table for *_, table in edge], axis=-1))
    return problem


@st.composite
def several_networks(draw: st.DrawFn) -> list[tuple[list[np.ndarray], list[Edge]]]:
    """Two or three of one shape."""
    sizes, pairs = draw(shapes())
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))

    def table(*shape: int) -> np.ndarray:
        """Costs as `COSTS`: drawn one by one they are most of the test's time."""
        kinds = [rng.integers(-4, 5, shape) * 1.0, np.full(shape, inf), rng.random(shape)]
        return np.choose(rng.integers(0, 3, shape), kinds)

    return [
        ([table(n) for n in sizes], [(u, v, table(sizes[u], sizes[v])) for u, v in pairs])
        for _ in range(draw(st.integers(2, 3)))
    ]


@settings(max_examples=300, deadline=None)
@given(several_networks())
def test_cases_are_minimised_as_each_alone(several):
    expected = [brute_force(*case) for case in several]
    if inf in expected:
        with pytest.raises(PlanError, match="no labels have a finite cost"):
            cases_of(several).minimise_cases()
        return
    found = cases_of(several).minimise_cases()
    assert [each.cost for each in found] == pytest.approx(expected, abs=1e-12)
    for case, solution in zip(several, found, strict=True):
        assert cost_at(*case, solution.labels) == pytest.approx(solution.cost, abs=1e-12)


@settings(max_examples=300, deadline=None)
@given(tiny_networks())
def test_minimise_equals_brute_force(case: tuple[list[np.ndarray], list[Edge]]) -> None:
    expected = brute_force(*case)
    if expected == inf:
        with pytest.raises(PlanError, match="no labels have a finite cost"):
            network(*case).minimise()
        return
    found = network(*case).minimise()
    assert found.cost == pytest.approx(expected, abs=1e-12)
    assert cost_at(*case, found.labels) == pytest.approx(expected, abs=1e-12)


def test_last_label_of_a_variable_that_its_neighbours_forbade():
    """Labels are dropped first, so no joined table is all inf: found by hypothesis."""
    free, last = np.zeros((2, 2)), np.array([[0.0, 0.0], [0.0, inf]])
    unaries = [np.zeros(n) for n in (2, 2, 1, 2, 2, 2)]
    unaries[4][1] = inf
    edges = [
        (0, 1, last), (2, 3, np.array([[0.0, inf]])), (0, 1, free), (0, 1, free),
        (0, 2, np.zeros((2, 1))), (1, 3, free), (4, 0, free), (5, 1, last),
        (4, 3, np.array([[inf, 0.0], [0.0, 0.0]])), (4, 5, last),
        (5, 0, np.array([[0.0, 0.0], [inf, 0.0]])),
    ]  # fmt: skip
    assert brute_force(unaries, edges) == inf
    with pytest.raises(PlanError, match="no labels have a finite cost"):
        network(unaries, edges).minimise()


@pytest.mark.parametrize("density", [0.15, 0.35, 0.7])
@pytest.mark.parametrize("inf_share", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(4))
def test_minimise_equals_milp(seed: int, density: float, inf_share: float) -> None:
    unaries, edges = random_network(seed, density, inf_share)
    expected = milp_minimum(unaries, edges)
    if expected == inf:
        with pytest.raises(PlanError):
            network(unaries, edges).minimise()
    else:
        assert network(unaries, edges).minimise().cost == pytest.approx(expected, abs=1e-6)


@settings(max_examples=50, deadline=None)
@given(tiny_networks())
def test_minimise_twice_leaves_the_network_unchanged(
    case: tuple[list[np.ndarray], list[Edge]],
) -> None:
    problem = network(*case)

    def outcome() -> Solution | str:
        try:
            return problem.minimise()
        except PlanError as error:
            return str(error)

    assert outcome() == outcome()


def test_labels_are_lowest_when_all_tie() -> None:
    sizes = [3, 4, 2, 3, 4]
    complete = [(u, v, np.zeros((sizes[u], sizes[v]))) for u in range(5) for v in range(u)]
    found = network([np.ones(n) for n in sizes], complete).minimise()
    assert found.labels == (0, 0, 0, 0, 0)
    assert found.cost == 5.0


@pytest.mark.parametrize(
    ("pairs", "width"),
    [
        ([], 0),
        ([(i, i + 1) for i in range(7)], 1),
        ([(0, i) for i in range(1, 8)], 1),
        ([(i, (i + 1) % 8) for i in range(8)], 2),
        ([(u, v) for u in range(8) for v in range(u)], 7),
    ],
    ids=["isolated", "chain", "star", "cycle", "complete"],
)
def test_width_equals_treewidth_when_the_graph_is_simple(
    pairs: list[tuple[int, int]], width: int
) -> None:
    # Symmetric, so neither label dominates and the complete graph stays complete.
    edges = [(u, v, np.eye(2)) for u, v in pairs]
    assert network([np.zeros(2)] * 8, edges).minimise().width == width


def test_minimise_returns_nothing_when_empty() -> None:
    assert CostNetwork().minimise() == Solution((), 0.0, 0, 0)


def test_cost_equals_the_sum_of_tables() -> None:
    table = np.array([[0.0, 2.0], [3.0, 0.0]])
    problem = network([np.array([0.0, 1.0]), np.array([5.0, 0.0])], [(0, 1, table), (1, 0, table)])
    assert problem.cost((0, 1)) == 0 + 0 + 2 + 3
    assert problem.minimise().labels == (1, 1)


def test_error_names_the_edge_when_it_is_all_inf() -> None:
    edges = [(0, 1, np.zeros((2, 2))), (1, 2, np.full((2, 2), inf))]
    with pytest.raises(PlanError, match=r"labels of \(x1, x2\) is forbidden"):
        network([np.zeros(2)] * 3, edges).minimise()


def test_error_names_the_conflict_when_tables_join_to_inf() -> None:
    same, other = np.where(np.eye(2), 0, inf), np.where(np.eye(2), inf, 0)
    edges = [(0, 1, same), (1, 2, same), (0, 2, other)]  # x0 is removed first, without a conflict
    with pytest.raises(PlanError, match=r"labels of \(x1, x2\) is forbidden"):
        network([np.zeros(2)] * 3, edges).minimise()


def test_error_names_the_variable_when_rows_add_up_to_inf() -> None:
    edges = [(0, 1, np.array([[inf, 0.0], [inf, inf]]))]
    with pytest.raises(PlanError, match="is forbidden"):
        network([np.array([inf, 0.0]), np.zeros(2)], edges).minimise()


@pytest.mark.parametrize("seed", range(5))
def test_repeated_layers_give_the_same_when_their_tables_are_one_array(seed: int) -> None:
    rng = np.random.default_rng(seed)
    unary = rng.integers(0, 9, 3) * 1.0
    tables = [rng.integers(0, 9, (3, 3)) * 1.0 for _ in range(4)]
    pairs = [(0, 1), (0, 2), (1, 3), (2, 3), (1, 2), (0, 3)]
    layers = [(3 * i + u, 3 * i + v, tables[(u + v) % 4]) for i in range(6) for u, v in pairs]
    hub = [(0, v, tables[0]) for v in range(4, 19)]
    shared = network([unary] * 19, layers + hub).minimise()
    copies = [(u, v, table.copy()) for u, v, table in layers + hub]
    assert network([unary.copy() for _ in range(19)], copies).minimise() == shared


def test_error_says_how_many_combinations_there_are_when_a_table_is_too_large() -> None:
    complete = [(u, v, np.eye(4)) for u in range(6) for v in range(u)]
    with pytest.raises(PlanError, match=r"got 4.1e\+03 combinations; expected at most 1e\+03"):
        network([np.zeros(4)] * 6, complete, largest_table_entries=1000).minimise()


def test_minimise_rejects_nan() -> None:
    with pytest.raises(AssertionError, match="a cost is nan"):
        network([np.array([0.0, np.nan])], []).minimise()
