"""What a model's forward returns besides its loss: all tensors of it, in its own structure."""
