"""Dims that collectives are tried on."""

# (size, parent, shift, zigzag): even, uneven, shorter than the group, an end or a start cut off.
SIZES = [(8, 8, 0), (7, 7, 0), (1, 1, 0), (6, 7, 0), (6, 7, 1)]
DIMS = [(*size, zigzag) for size in SIZES for zigzag in (False, True)]
