"""`torch.compile(model, backend="dcpc")`: what Dynamo hands over, by dcpc's passes."""

from dcpc.dynamo.entry import backend

__all__ = ["backend"]
