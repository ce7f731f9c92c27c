"""A small machine for the simulator's tests: rows by a formula, three buckets, eight ranks."""

from dcpc.buckets import Bucket
from dcpc.commands.simulate.model_rows import BucketCosts, ModelCosts, SimRow

SHORT, MIDDLE, LONG = (Bucket.of({"seq": n}) for n in (128, 1024, 8192))


def model_costs(world: int = 8, usual: int = 0) -> ModelCosts:
    """Returns costs of a rank that holds 4096 tokens, 8192 with all recomputed."""
    buckets = []
    for bucket in (SHORT, MIDDLE, LONG):
        tokens = bucket["seq"]
        least, full = [], []
        for sp in (d for d in (1, 2, 4, 8) if d <= world):
            for micro_batch in (1, 2, 4, 8, 16, 32):
                held = tokens * micro_batch / sp
                seconds_s = (1e-6 * tokens + 1e-10 * tokens**2) * micro_batch / sp + 1e-4 * sp
                wire = float(tokens * micro_batch) if sp > 1 else 0.0
                if held <= 4096:
                    least.append(SimRow(sp, micro_batch, 0, seconds_s, wire))
                elif held <= 8192:
                    least.append(SimRow(sp, micro_batch, 1, 1.3 * seconds_s, wire))
                if held <= 8192:
                    full.append(SimRow(sp, micro_batch, 1, 1.3 * seconds_s, wire))
        buckets.append(BucketCosts(bucket, tokens, tuple(least), tuple(full), usual))
    return ModelCosts(tuple(buckets), world, 8, 1e6, 1e-3)
