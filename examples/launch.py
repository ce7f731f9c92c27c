"""Runs a function on several gloo ranks of this machine, by torch.distributed's own launcher.

The same as `torchrun --standalone --nproc-per-node N`, called from Python. One rank's error ends
the others; the launcher ends with its children, and they with it.
"""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def launch(function: Callable[..., Any], world: int, *args: Any) -> dict[int, Any]:
    """Returns rank -> result of `function(*args)`, called on `world` ranks of one thread each.

    Args:
        function: at module level, as it is pickled by name; inside it `dist` is initialised.
        world: number of ranks.
        args: passed on, pickled.

    Raises:
        SystemExit: a rank failed, whose traceback is then on stderr, or a signal came.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
    )
    # The C++ allocator warns when something older than a profile is freed in it.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Its log repeats the traceback that is printed here, on a prefixed line each.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        return elastic_launch(config, _on_rank)(function, *args)
    except ChildFailedError as e:
        print(e.format_msg(), file=sys.stderr)
        raise SystemExit(1) from None
    except SignalException as e:  # the ranks have been ended
        raise SystemExit(128 + e.sigval) from None


def _on_rank(function: Callable[..., Any], *args: Any) -> Any:
    with _process_group():
        return function(*args)


@contextmanager
def _process_group() -> Generator[None, None, None]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()
