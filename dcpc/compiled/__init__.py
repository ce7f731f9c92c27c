"""A compiled model: an `nn.Module` that runs the variant of each call's shape."""

from dcpc.codegen.lower.output_pieces import OutputPiece
from dcpc.compiled.model import CompiledModel

__all__ = ["CompiledModel", "OutputPiece"]
