"""What dcpc adds to torch.fx: told fake tensors, writes as values, keys of arguments."""
