"""A model in stages as users have it: `dcpc.compile(pipeline=)`, the loader's plans, a step."""
