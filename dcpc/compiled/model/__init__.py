"""What users hold: an `nn.Module` that runs the variant of each call's shape."""

from dcpc.compiled.model.model import CompiledModel

__all__ = ["CompiledModel"]
