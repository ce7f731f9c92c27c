"""What the loader and the train step need of a compiled model, and no more."""

from collections.abc import Mapping
from typing import Protocol

from dcpc.buckets import Bucket, Buckets
from dcpc.ir import BucketPlan
from dcpc.runtime.groups import Groups


class Compiled(Protocol):
    """A model compiled for some buckets on some ranks."""

    @property
    def buckets(self) -> Buckets:
        """The shape buckets and the input specs."""

    @property
    def plans(self) -> Mapping[Bucket, BucketPlan]:
        """The setting of each bucket."""

    @property
    def groups(self) -> Groups:
        """The process groups."""
