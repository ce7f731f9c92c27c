"""How much better a choice must be to be taken: shares of predicted seconds, with the reasons.

Predictions are off, and each other choice costs something that no prediction has: a variant to
compile, ranks that others could use, a launch. So none is taken for less than this.
"""

# Choosing a bucket's setting (`plan/`).
DOUBLING_GAIN = 0.01  # twice the micro-batch: seconds level off, and larger ones take longer to try
MICRO_BATCH_GAIN = 0.05  # a larger one leaves the planner of steps less room
WIDER_GROUP_GAIN = 0.2  # a wider group only takes ranks where it is hardly faster
TILE_GAIN = 0.02  # tiles of the logits: a second program, whose launches are not counted
AWAY_GAIN = 0.02  # values that leave, besides recompute: copies are not seen to be hidden
SENDING_LOSS = 0.01  # a placement that sends less: no prediction of seconds is better than this
PLACEMENT_LOSS = 0.02  # another bucket's placement is taken instead: one graph less to make

# Choosing a step's plan (`runtime/planner/`).
ROW_GAIN = 0.03  # a row of the table: each is a variant, and a longer search
FINER_CUT_GAIN = 0.03  # finer micro-batches: each costs a launch, which no line through samples has
OTHER_KIND_GAIN = 0.01  # a plan of another kind brings more variants

# Choosing how samples are run (`runtime/data/`, `compiled/unpadding/`).
PACKING_GAIN = 0.01  # a step with packed rows brings more variants
UNPADDING_GAIN = 0.06  # a call without padding is predicted with an error of some percent
