"""Translation validation: what dcpc runs is compared with the user's own model, by machine."""

from dcpc.verify.verifier import MODES, Verifier, check_mode

__all__ = ["MODES", "Verifier", "check_mode"]
