"""Refuses, by class name, models that are wrapped for another system or cannot be captured."""

from __future__ import annotations

from torch import nn

from dcpc.errors import TraceError

# By name, as some take seconds to import: a class -> what to pass, and why.
_SUMS = "dcpc sums gradients over the ranks itself (train_step, or reduce_gradients by hand)"
_SHARES = "dcpc shares out parameters itself (parameters='step', 'pull' or 'rounds')"
_WRAPPERS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": ("{}.module", _SUMS),
    "torch.nn.parallel.data_parallel.DataParallel": ("{}.module", _SUMS),
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": (
        "the module as it was before it was wrapped",
        _SHARES,
    ),
    "torch.distributed.fsdp.FSDPModule": ("the module as it was before fully_shard", _SHARES),
    "torch.distributed.fsdp._fully_shard._fully_shard.FSDPModule": (
        "the module as it was before fully_shard",
        _SHARES,
    ),
    "torch._dynamo.eval_frame.OptimizedModule": (
        "{}._orig_mod",
        "dcpc captures and compiles the module itself (backend='inductor' is what torch.compile "
        "runs)",
    ),
    "torch.jit._script.ScriptModule": (
        "the module that was scripted or traced",
        "no graph can be captured of TorchScript",
    ),
}


def refuse_wrapped(model: nn.Module) -> None:
    """Refuses a model that is, or contains, a wrapper of another system (DDP, FSDP, TorchScript).

    A submodule wrapped by `torch.compile` is accepted: it is captured as the module inside.

    Raises:
        TraceError: there is such a module, or a parameter is a `DTensor`.
    """
    for name, module in model.named_modules():
        for kind in type(module).__mro__:
            known = _WRAPPERS.get(f"{kind.__module__}.{kind.__qualname__}")
            if known is None or (name and kind.__qualname__ == "OptimizedModule"):
                continue
            instead, why = known
            what = f"model.{name}" if name else "model"
            raise TraceError(
                f"{what}: got a {kind.__qualname__}; expected the module inside, as {why}; pass "
                f"{instead.format(what)}" + " in its place" * bool(name)
            )
    for name, parameter in model.named_parameters():
        if type(parameter).__name__ == "DTensor" or type(parameter.data).__name__ == "DTensor":
            raise TraceError(
                f"model: got parameter '{name}' as a DTensor; expected plain tensors, as "
                f"{_SHARES}; pass the module as it was before"
            )
