"""Plain PyTorch models, one file each; they never import dcpc."""
