"""Programs by seed."""

from __future__ import annotations

import tests.fuzz.attentions
import tests.fuzz.layers
import tests.fuzz.templates  # noqa: F401 - all add templates
from tests.fuzz.draw import WIDTH, B, Draw, H, Value, W
from tests.fuzz.losses import term
from tests.fuzz.program import Program


def generate(seed: int, most: int = 6) -> Program:
    """Returns the program of a seed: a few steps from an input, or two, to a loss of all ends.

    Args:
        seed: of all that is drawn.
        most: steps.
    """
    d = Draw(seed)
    first = d.put(f"x @ {d.parameter(WIDTH, WIDTH)}", (B, H, WIDTH))
    if d.both:
        other = d.put(f"y @ {d.parameter(WIDTH, WIDTH)}", (B, W, WIDTH))
        d.mirror |= {first.name: other, other.name: first}
    for _ in range(d.rng.randint(1 + (most > 3), most)):
        d.step()
    for v in ends(d)[: max(1, most // 2)]:
        term(d, v)
    return d.program()


def ends(d: Draw) -> list[Value]:
    """Returns the values that no step reads, and now and then one that is read."""
    read = {name for s in d.steps for name in s.reads}
    found = [v for v in d.values if v.name not in read]
    if d.flag(0.2):
        found.append(d.rng.choice(d.values))
    return found
