"""Transient memory of attention, and the pairs of query and key it computes."""

from dcpc.symbolic_profile.ops.attention.rings import (
    ring_backward,
    ring_backward_bound,
    ring_forward,
    ring_forward_bound,
    swap,
)
from dcpc.symbolic_profile.ops.attention.row_costs import rows_backward, rows_forward
from dcpc.symbolic_profile.ops.attention.scratch import BSHD, kernel, kernel_backward
from dcpc.symbolic_profile.ops.attention.whole_costs import (
    backward,
    backward_bound,
    blocks,
    blocks_backward,
    forward,
    forward_bound,
    groups_of,
    mask_backward,
    pairs,
    sight_of,
)
