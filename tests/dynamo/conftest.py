"""What the tests of the backend begin with."""

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    """Each test begins with no graphs and no counts of Dynamo's, and with one seed."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
