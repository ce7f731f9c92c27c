"""Phase 1: an `nn.Module` becomes a functional forward graph with symbolic dims."""

from dcpc.trace.capture.autocast import autocast_dtype, casting, checked_dtype
from dcpc.trace.capture.capture import trace

__all__ = ["autocast_dtype", "casting", "checked_dtype", "trace"]
