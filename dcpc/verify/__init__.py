"""Translation validation: what dcpc runs is compared with the user's own model, by machine."""

from dcpc.verify.compare import Given
from dcpc.verify.exactness import LossAndGradients
from dcpc.verify.verifier import Verifier

__all__ = ["Given", "LossAndGradients", "Verifier"]
