"""The backend of `torch.compile(model, backend="dcpc")`: dcpc's passes on Dynamo's graphs."""

from dcpc.dynamo.entry import backend

__all__ = ["backend"]
