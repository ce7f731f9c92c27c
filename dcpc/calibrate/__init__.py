"""`dcpc calibrate`: seconds of a model's calls on the real device, as fits that plans use."""

from dcpc.calibrate.calibrate import calibrate, fitted

__all__ = ["calibrate", "fitted"]
