"""The ways to hold parameters, and what each keeps on a rank."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.parameters.rows import SharedRows
from dcpc.runtime.parameters.shared import SharedStore
from dcpc.runtime.parameters.store import RowStore, WholeStore

STORES: dict[str, type[WholeStore]] = {"whole": WholeStore, "step": RowStore, "pull": SharedStore}


def store_of(mode: str, parameters: Iterable[nn.Parameter], groups: Groups) -> WholeStore:
    """Returns who holds what of a model's parameters; a rank alone holds all.

    Args:
        mode: one of `STORES`.
        parameters: of the model.
        groups: the process groups.
    """
    return (WholeStore if groups.world == 1 else STORES[mode])(parameters, groups)


def shares(parameters: Iterable[nn.Parameter], world: int) -> list[nn.Parameter]:
    """Returns parameters on the meta device like the rows of the rank that has most of them.

    Args:
        parameters: of the model.
        world: ranks.
    """
    return [
        nn.Parameter(p.new_empty(SharedRows(p.shape, world).shape_of(0), device="meta"),
                     requires_grad=p.requires_grad)
        for p in parameters
    ]  # fmt: skip
