"""`torch.export` of a module, checked: everything it took for granted."""
