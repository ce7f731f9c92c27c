"""What work takes on a device: hardware, calibrated fits, time."""
