"""Phase 1: an `nn.Module` becomes a functional forward graph with symbolic dims."""

from dcpc.trace.capture import trace

__all__ = ["trace"]
