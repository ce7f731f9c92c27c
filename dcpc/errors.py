"""Errors a user can meet: `DcpcError` and one subclass for each phase.

Every message has three parts: what (node, op, bucket, rank), got / expected with units, what to do.
A broken invariant of dcpc's own is an `assert` with a message, never one of these.
"""


class DcpcError(Exception):
    """Base of every error that dcpc raises for a user's mistake or an unmet request."""


class BucketError(DcpcError):
    """An input spec, a bucket size or a bucket file is wrong."""


class TraceError(DcpcError):
    """The module cannot be captured as one graph with symbolic dims."""


class RuleError(DcpcError):
    """A sharding rule is malformed or contradicts the op it is for."""


class ProfileError(DcpcError):
    """A cost cannot be derived from the graph."""


class PlanError(DcpcError):
    """No plan meets the request (memory, degree, micro-batch)."""


class CodegenError(DcpcError):
    """A plan cannot be turned into a runnable variant."""


class VerifyError(DcpcError):
    """What dcpc would run does not compute what the model computes."""


class DispatchError(DcpcError):
    """A call's arguments match no bucket or no input spec."""


class GroupError(DcpcError):
    """Ranks of a process group disagree, or one of them did not arrive in time."""


class CheckpointError(DcpcError):
    """A checkpoint cannot be written or read, or is of something else."""


class DataError(DcpcError):
    """A dataset or a sample cannot be dealt out as asked."""
