"""Seconds of work on a device: hardware, calibrated fits, time."""
