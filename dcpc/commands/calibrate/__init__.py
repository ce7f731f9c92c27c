"""`dcpc calibrate`: seconds of a model's calls on the real device, as fits that plans use."""

from dcpc.commands.calibrate.calibrate import calibrate, fitted
from dcpc.commands.calibrate.command import calibrate_command, calibration_text

__all__ = ["calibrate", "calibrate_command", "calibration_text", "fitted"]
