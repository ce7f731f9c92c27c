"""The outputs of forward besides its loss: all of its tensors, in their own structure."""
