"""Graph modules whose Python is made when one is called: most are only planned with."""

from __future__ import annotations

import torch.fx._lazy_graph_module

LazyGraphModule = torch.fx._lazy_graph_module._LazyGraphModule
