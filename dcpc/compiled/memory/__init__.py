"""Memory while steps run: units of parameters that stay, and plans with less where it was short."""
