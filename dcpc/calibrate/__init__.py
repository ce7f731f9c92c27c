"""`dcpc calibrate`: seconds of a model's calls on the real device, as fits that plans use."""

from dcpc.calibrate.calibrate import calibrate, fitted
from dcpc.calibrate.command import calibrate_command, calibration_text

__all__ = ["calibrate", "calibrate_command", "calibration_text", "fitted"]
