"""A model of one input traced once, whose variants run here, against the plain one."""

import torch

from dcpc.buckets import Buckets
from dcpc.plan.runnable import Runnable
from dcpc.plan.traced import traced
from dcpc.symbolic_profile import detect
from tests.cases.exactness import gradient_error, loss_error, plain


class Made:
    """The variants of a model of x, `[batch, seq, 8]`, in float64."""

    def __init__(self, model, backend="eager"):
        torch.manual_seed(0)
        self.model = model.double()
        buckets = Buckets({"x": "float64[batch, seq, 8]"}, sizes=[{"seq": 3}, {"seq": 512}])
        known = traced(self.model, buckets, detect(), backend)
        self.program, self.held = known.program, known.tensors
        self.runnable = Runnable(known)
        self.priced = self.runnable.priced
        self.placement = self.priced.placement({"batch": 2, "seq": 16}, 1)
        self.recompute = (0, self.priced.at(self.placement).steps - 1)

    def step(self, batch, seq, recompute):
        """A call of the variant for these sizes, and its input."""
        sizes, x = {"batch": batch, "seq": seq}, torch.randn(batch, seq, 8, dtype=torch.float64)
        variant, integers = self.runnable.variant(self.placement, recompute, sizes, 0)
        named = {**self.held(), **dict.fromkeys(self.program.inputs, x)}
        self.model.zero_grad()
        return lambda: variant([named[p] for p in variant.placeholders], integers), x

    def error(self, batch, seq, recompute=0):
        """The largest relative error of the loss and the gradients."""
        run, x = self.step(batch, seq, recompute)
        expected, gradients = plain(self.model, {"x": x})
        self.model.zero_grad()
        loss = run()
        loss.backward()
        return max(loss_error(loss, expected), gradient_error(self.model, gradients))
