"""The train step: micro-batches, the sum of gradients, measured seconds."""
