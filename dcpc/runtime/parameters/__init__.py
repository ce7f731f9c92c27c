"""Who holds which part of the model's parameters, and how their gradients get there."""
