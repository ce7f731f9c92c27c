"""Makes a failing program smaller while it fails in the same way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

from tests.fuzz.program import Program, Step

T = TypeVar("T")


def shrink(program: Program, fails: Callable[[Program], bool], most: int = 150) -> Program:
    """Returns the smallest program found that fails; at most so many are tried."""
    return descend(program, _smaller, fails, most)


def descend(
    failing: T, simpler: Callable[[T], Iterable[T]], fails: Callable[[T], bool], most: int
) -> T:
    """Goes on from the first simpler one that fails, until none does or `most` were tried."""
    tried = 0
    improved = True
    while improved:
        improved = False
        for candidate in simpler(failing):
            tried += 1
            if tried > most:
                return failing
            if fails(candidate):
                failing, improved = candidate, True
                break
    return failing


def alive(program: Program) -> Program:
    """Returns the program without steps that no term reads."""
    wanted = set(program.terms)
    kept: list[Step] = []
    for step in reversed(program.steps):
        if step.out in wanted:
            kept.append(step)
            wanted |= set(step.reads)
    steps = tuple(reversed(kept))
    text = "\n".join(line for s in steps for line in s.lines)
    parameters = {n: made for n, made in program.parameters.items() if f"self.{n}" in text}
    return replace(program, steps=steps, parameters=parameters)


def _smaller(program: Program) -> Iterator[Program]:
    yield from _with_fewer_terms(program)
    for i in reversed(range(len(program.steps))):
        yield from _without(program, i)
    for i in range(len(program.steps)):
        yield from _with_less(program, i)
    if program.layout:
        yield replace(program, layout="")
    if len(program.points) > 1:
        for i in range(len(program.points)):
            points = (*program.points[:i], *program.points[i + 1 :])
            yield replace(program, points=points)


def _with_fewer_terms(program: Program) -> Iterator[Program]:
    if len(program.terms) < 2:
        return
    for kept in program.terms:
        some = tuple(s for s in program.steps if s.kind != "term" or s.out == kept)
        yield alive(replace(program, steps=some))
    for gone in program.terms:
        yield alive(replace(program, steps=tuple(s for s in program.steps if s.out != gone)))


def _with_less(program: Program, i: int) -> Iterator[Program]:
    """Leaves out lines of a step, or puts a plain sum in a term's place."""
    step = program.steps[i]
    for j in range(1, len(step.lines)):
        lines = (*step.lines[:j], *step.lines[j + 1 :])
        yield alive(_put(program, i, replace(step, lines=lines)))
    if step.kind != "term" or step.lines[0].endswith(".square().sum()"):
        return
    for read in step.reads:
        if re.fullmatch(r"v\d+", read):
            lines = (f"{step.out} = {read}.square().sum()",)
            yield alive(_put(program, i, replace(step, lines=lines, reads=(read,))))


def _without(program: Program, i: int) -> Iterator[Program]:
    """Puts an earlier value of the same shape in the place of a step's."""
    step = program.steps[i]
    if step.kind == "term":
        return
    for other in reversed(program.steps[:i]):
        if other.shape == step.shape and other.kind == step.kind:
            steps = [
                replace(
                    s,
                    lines=tuple(re.sub(rf"\b{step.out}\b", other.out, x) for x in s.lines),
                    reads=tuple(other.out if r == step.out else r for r in s.reads),
                )
                for s in program.steps
                if s is not step
            ]
            yield alive(replace(program, steps=tuple(steps)))
            return


def _put(program: Program, i: int, step: Step) -> Program:
    return replace(program, steps=(*program.steps[:i], step, *program.steps[i + 1 :]))
