"""What each call of a graph costs alone, at given sizes: what a choice of recompute weighs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import sympy
from torch import fx

from dcpc.symbolic_profile.facts import Facts
from dcpc.symbolic_profile.hardware import Device
from dcpc.symbolic_profile.polynomials import Basis, Floats, values_of
from dcpc.symbolic_profile.profile import work_of
from dcpc.symbolic_profile.time import Roofline


class CallCosts:
    """Seconds and bytes of each call.

    Args:
        nodes: calls of one graph, in any order.
        names: torch symbol -> expression of the bucket's dims.
        sp: ranks of the group of every collective.
    """

    def __init__(
        self, nodes: Sequence[fx.Node], names: Mapping[sympy.Symbol, sympy.Expr], sp: int
    ) -> None:
        facts = Facts(names)
        self._symbols = facts.symbols
        each = [work_of(n, facts, sp, forward=True) for n in nodes]
        work = [w for w in each if w is not None]
        self._priced = [i for i, w in enumerate(each) if w is not None]
        values = [facts.of(n) for n in nodes]
        sizes = [v[0].storage_bytes if v else sympy.Integer(0) for v in values]
        basis = Basis([*sizes, *(e for w in work for e in (w.flops, w.bytes_moved, w.wire_bytes))])
        self._size_rows = basis.matrix(sizes)
        self._monomials = basis.compile(self._symbols)
        self._roofline = Roofline(work, basis)

    def at(self, dims: Mapping[str, int], device: Device) -> tuple[Floats, Floats]:
        """Returns seconds and bytes of each call, `[calls]` both; a view has 0 seconds.

        Args:
            dims: symbol name -> size.
            device: what they run on.
        """
        floats = {name: float(size) for name, size in dims.items()}
        monomials = np.array(self._monomials(*values_of(self._symbols, floats)), dtype=np.float64)
        seconds = np.zeros(len(self._size_rows))
        if self._priced:
            seconds[self._priced] = self._roofline.seconds(monomials, device)
        return seconds, self._size_rows @ monomials
