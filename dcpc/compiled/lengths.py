"""Lengths besides a bucket's own: at which of them its graphs run, and why not at others."""

from __future__ import annotations

from collections.abc import Mapping

from dcpc.buckets import Bucket
from dcpc.errors import DispatchError
from dcpc.plan.planning import Planned
from dcpc.plan.traced import Traced


class TraceLengths:
    """The lengths at which the traces of a plan are right.

    Attributes:
        compiled_anew: bucket of which Inductor would compile each length by itself -> the name of a
            call because of which.
    """

    def __init__(self, planned: Planned) -> None:
        """Looks through each trace once.

        Args:
            planned: plan with the traces of all buckets.
        """
        self._by_bucket, self._static = planned.by_bucket, planned.static
        calls = {id(v): _call_compiled_anew(v.traced) for v in planned.traces}
        self.compiled_anew = {b: n for b, v in self._by_bucket.items() if (n := calls[id(v)])}
        self._right: dict[tuple[Bucket, Bucket], bool] = {}

    def least(self, bucket: Bucket) -> dict[str, int]:
        """Returns the shortest length of each dim that the graphs of a bucket are traced for."""
        least = self._by_bucket[bucket].traced.program.least
        # A dim that is 1 is so in every bucket of the trace.
        return {name: least.get(name, size) for name, size in bucket.shape_key}

    def right_at(self, bucket: Bucket, sizes: Mapping[str, int]) -> bool:
        """Whether the graphs of a bucket are right at some lengths.

        Args:
            bucket: bucket that is as long in each dim, or longer.
            sizes: length of each named dim, the batch left out.
        """
        key = bucket, Bucket.of(sizes)
        if key not in self._right:
            least, program = self.least(bucket), self._by_bucket[bucket].traced.program
            within = all(least[n] <= size <= bucket[n] for n, size in sizes.items())
            same = key[1].dims == bucket.shape_key
            self._right[key] = same or (within and program.holds_at(sizes))
        return self._right[key]

    def runs_at(self, bucket: Bucket, sizes: Mapping[str, int]) -> bool:
        """Whether a bucket's graphs are right at lengths, and not compiled for each by itself."""
        return bucket not in self.compiled_anew and self.right_at(bucket, sizes)

    def refuse(self, bucket: Bucket, sizes: Mapping[str, int], what: str) -> None:
        """Refuses lengths that are not a bucket's and at which its graphs are not right.

        Args:
            bucket: bucket that is as long in each dim, or longer.
            sizes: length of each named dim, the batch left out.
            what: has these lengths: "call" or "micro-batch".

        Raises:
            DispatchError: they are such.
        """
        if not self.right_at(bucket, sizes):
            raise DispatchError(
                f"a {what} of {bucket}: got {Bucket.of(sizes)}; expected lengths at which the "
                f"bucket's graphs are right: from {Bucket.of(self.least(bucket))} on, where the "
                "trace takes none for granted; pad to the bucket, or add these lengths to sizes="
                + "".join(
                    f"; '{n}' is static, as forward takes it for a number{line}"
                    for n, line in self._static.items()
                )
            )

    def refuse_compiled_anew(self, bucket: Bucket, sizes: Mapping[str, int]) -> None:
        """Refuses a call at lengths that Inductor would compile by themselves.

        Raises:
            DispatchError: they are such.
        """
        if bucket in self.compiled_anew and Bucket.of(sizes).dims != bucket.shape_key:
            raise DispatchError(
                f"a call of {bucket}: got {Bucket.of(sizes)}; expected the bucket's lengths, as "
                f"Inductor would compile {self.compiled_anew[bucket]} anew for each length; pad to "
                "the bucket, add these lengths to sizes=, or compile with backend='eager'"
            )


def _call_compiled_anew(traced: Traced) -> str:
    """Returns a call that Inductor compiles anew for each length; "": there is none."""
    calls = (n for n in traced.program.gm.graph.nodes if n.op == "call_function")
    names = (n.name for n in calls if "adaptive" in str(n.target))
    return "" if traced.backend == "eager" else next(names, "")
