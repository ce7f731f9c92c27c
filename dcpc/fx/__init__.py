"""Additions to torch.fx: fast fake tensors, writes as values, keys of arguments."""
