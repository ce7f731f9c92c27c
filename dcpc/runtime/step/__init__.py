"""The train step: micro-batches, the sum of gradients, what was measured."""
