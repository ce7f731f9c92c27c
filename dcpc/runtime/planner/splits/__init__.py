"""Exact splits of samples into micro-batches that are padded to their longest one: DynaPipe's."""
