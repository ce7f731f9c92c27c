"""The compiled model: an `nn.Module` that runs the variant of each call's shape."""

from dcpc.compiled.model.core import ModelCore
from dcpc.compiled.model.insight import ModelInsight
from dcpc.compiled.model.model import CompiledModel
from dcpc.compiled.model.running import ModelOnGroup

__all__ = ["CompiledModel", "ModelCore", "ModelInsight", "ModelOnGroup"]
