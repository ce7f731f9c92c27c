"""Translation validation: dcpc's graphs are compared with the user's own model, by machine."""

from dcpc.verify.compare import Given
from dcpc.verify.exactness import LossAndGradients
from dcpc.verify.verifier import Verifier

__all__ = ["Given", "LossAndGradients", "Verifier"]
