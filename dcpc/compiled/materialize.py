"""Memory and values for a model that was compiled on the meta device, one module after the other.

    store of hollow parameters       a rank's rows of all of them, without values
    a module's own tensors, whole    drawn or computed by init, the same on every rank
      └► the store takes its rows    and the whole ones are freed: the next module
    the model holds what has memory

Values are drawn on the CPU, whatever the device: they are the same on each, and on every rank.

Until the end the model stays on the meta device, so an init that reaches into other modules is
found, and one that fails leaves the model as it was.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dcpc import codegen
from dcpc.errors import DcpcError, DispatchError
from dcpc.fx.writes import WriteLog
from dcpc.runtime.groups.agreement import agree
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.groups.same_state import checksum
from dcpc.runtime.parameters.hollow import hollow
from dcpc.runtime.parameters.modes import kind_of, store_of
from dcpc.runtime.parameters.store import AwayMemory, ParameterStore
from dcpc.trace.capture.module_state import holding, put_in_place

_CPU = torch.device("cpu")
Init = Callable[[nn.Module], object] | str | None


def on_meta(model: nn.Module) -> bool:
    """Whether a model has parameters or buffers on the meta device."""
    return any(t.is_meta for t in (*model.parameters(), *model.buffers()))


def memory_of(store: str) -> AwayMemory | None:
    """Returns the memory beyond the device's of this name; None of none."""
    return codegen.store_of(store) if store else None


def made_real(
    model: nn.Module,
    mode: str,
    groups: Groups,
    init: Init,
    block: int = 0,
    away: AwayMemory | None = None,
) -> ParameterStore:
    """Returns the store of a model whose tensors of the meta device it gives memory and values.

    Collective over all ranks.

    Args:
        model: model of the user; it holds new tensors afterwards.
        mode: way to hold the parameters, as for `store_of`.
        groups: the process groups.
        init: way to make values, as for `dcpc.materialize`.
        block: number of ranks that share the parameters out; 0: all.
        away: where rows are, in "rounds"; None: on the device.

    Raises:
        DispatchError: as for `dcpc.materialize`; the model is as it was.
        GroupError: ranks initialised to different values, or one did not arrive.
    """
    modules = [
        _MetaModule(n, m, own) for n, m in _children_first("", model) if (own := _meta_tensors(m))
    ]
    _check_init(modules, init)
    device = groups.device
    _check_parameters(model, device)
    meta = [p for p in model.parameters() if p.is_meta]
    kept = kind_of(mode, groups, away).keeps_meta
    made = {id(p): p if kept else hollow(p, device) for p in meta}
    every = [made.get(id(p), p) for p in model.parameters()]
    store = store_of(mode, every, groups, block, away)
    filling = _Filling(store, made, device)
    problem = _fill(modules, filling, init, groups)
    values = filling.digest.hexdigest()
    agree(groups, groups.world, "values that dcpc.materialize gives", str(problem or values))
    if problem is not None:
        raise problem
    put_in_place(model, {**made, **filling.buffers})
    store.loaded()
    return store


@dataclass(frozen=True, slots=True)
class _MetaModule:
    """A module with tensors of its own on the meta device.

    Attributes:
        name: name in the model.
        module: module itself.
        own: name of a parameter or buffer of its own -> the tensor on the meta device.
    """

    name: str
    module: nn.Module
    own: Mapping[str, Tensor]

    def __str__(self) -> str:
        return f"module '{self.name}' ({type(self.module).__name__})"

    @property
    def tensors(self) -> str:
        """Names of its tensors."""
        return ", ".join(f"'{name}'" for name in self.own)


@dataclass(slots=True)
class _Filling:
    """The tensors that have values so far.

    Attributes:
        store: store of the parameters.
        made: id of a parameter on the meta device -> parameter of the store.
        device: device that they are on.
        buffers: id of a buffer on the meta device -> buffer with values.
        filled: ids of the tensors on the meta device for which there are values.
        digest: digest of all values in their order.
    """

    store: ParameterStore
    made: Mapping[int, nn.Parameter]
    device: torch.device
    buffers: dict[int, Tensor] = field(default_factory=dict)
    filled: set[int] = field(default_factory=set)
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)

    def take(self, at: Tensor, value: Tensor) -> None:
        """Takes a value for a parameter or buffer of the meta device, in place of one before.

        Args:
            at: tensor on the meta device.
            value: whole tensor of its shape.
        """
        self.digest.update(checksum(value).to_bytes(8, "little"))
        if id(at) not in self.made:
            # The graphs were made for its strides, whatever init put in its place.
            same = value.stride() == at.stride() and value.device == self.device
            self.buffers[id(at)] = value if same else _nan_like(at, self.device).copy_(value)
        else:
            self.store.fill(self.made[id(at)], value.detach())
        self.filled.add(id(at))


def _fill(
    modules: list[_MetaModule], filling: _Filling, init: Init, groups: Groups
) -> DcpcError | None:
    """Returns init's error; it is not raised here, as ranks have to tell each other first."""
    try:
        with _random_numbers_of_first(groups), torch.no_grad():
            for each in modules:
                if isinstance(init, str):
                    for tensor in each.own.values():  # one that is tied gets the same again
                        filling.take(tensor, _nan_like(tensor, filling.device, whole=False))
                else:
                    _initialise(each, filling, init)
    except DcpcError as e:
        return e
    except Exception as e:
        # Whatever a user's function raises: the other ranks wait.
        raised = DispatchError(
            f"dcpc.materialize: got {type(e).__name__} while a module was initialised: {e}; "
            "expected each to be initialised by itself, its parents and other modules being on "
            "the meta device; mend its reset_parameters, or pass init="
        )
        raised.__cause__ = e
        return raised
    return None


def _initialise(each: _MetaModule, filling: _Filling, init: Callable[..., object] | None) -> None:
    """Gives the tensors of one module values, and stores the part that this rank keeps."""
    real = {id(t): _nan_like(t, _CPU) for t in each.own.values()}
    places = {key: t.untyped_storage().data_ptr() for key, t in real.items()}
    module = each.module
    with holding(module, real), WriteLog() as log:
        if init is None:
            module.reset_parameters()  # type: ignore[operator]
        else:
            init(module)
        now = {**module._parameters, **module._buffers}
    if log.meta_shapes:
        raise DispatchError(
            f"dcpc.materialize: got {each}, which wrote to a tensor of another module, of shape "
            f"{log.meta_shapes[0]}, while it was initialised; expected writes to its own "
            f"({each.tensors}): modules get their values one by one, children first; pass an init= "
            "that gives each module its own values"
        )
    values = {
        n: t for n, at in each.own.items() if (t := _value(now.get(n), at, places, log)) is not None
    }
    unset = [n for n, at in each.own.items() if n not in values and id(at) not in filling.filled]
    if unset:
        raise DispatchError(
            f"dcpc.materialize: got {each} initialised, and '{unset[0]}' "
            f"({len(unset)} of {len(each.own)} tensors) got no value, or one of another shape, "
            "dtype or device; expected values for each: what __init__ computes on the meta device "
            "is lost; pass an init= that writes it"
        )
    tied = filling.filled & real.keys() if init is None else set[int]()
    for name, value in values.items():
        if id(each.own[name]) not in tied:  # of the first module alone: tied after it was made
            filling.take(each.own[name], value)


def _value(
    now: Tensor | None, at: Tensor, places: Mapping[int, int], log: WriteLog
) -> Tensor | None:
    """Returns a module's tensor `now`, as init left it, if init gave it values; else None."""
    if now is None or now.is_meta or now.shape != at.shape or now.dtype != at.dtype:
        return None
    place = now.untyped_storage().data_ptr()
    was_set = at.numel() == 0 or place != places[id(at)] or place in log.places
    return now if was_set else None


def _nan_like(at: Tensor, device: torch.device, whole: bool = True) -> Tensor:
    """Returns a tensor like one of the meta device, all NaN (0 if it has none of these).

    Unless `whole`, it has memory for one element alone.
    """
    nan = math.nan if at.is_floating_point() or at.is_complex() else 0
    if not whole and isinstance(at, nn.Parameter):
        return torch.full((), nan, dtype=at.dtype, device=device).expand(at.shape)
    made = torch.empty_strided(at.shape, at.stride(), dtype=at.dtype, device=device).fill_(nan)
    return nn.Parameter(made, at.requires_grad) if isinstance(at, nn.Parameter) else made


def _meta_tensors(module: nn.Module) -> dict[str, Tensor]:
    held = {**module._parameters, **module._buffers}
    return {name: t for name, t in held.items() if t is not None and t.is_meta}


def _children_first(
    name: str, module: nn.Module, seen: set[int] | None = None
) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules of a model in the order of `nn.Module.apply`, each once."""
    seen = set() if seen is None else seen
    for inner, child in module.named_children():
        if id(child) not in seen:
            yield from _children_first(f"{name}.{inner}".lstrip("."), child, seen)
    seen.add(id(module))
    yield name, module


@contextmanager
def _random_numbers_of_first(groups: Groups) -> Iterator[None]:
    """Has every rank draw rank 0's random numbers; one that had others goes on with its own."""
    own = torch.get_rng_state()
    first = own.clone()
    pg = groups.control(groups.world)
    if pg is not None:
        dist.broadcast(first, group=pg, group_src=0)
    torch.set_rng_state(first)
    try:
        yield
    finally:
        if not torch.equal(first, own):
            torch.set_rng_state(own)


def _check_init(modules: list[_MetaModule], init: Init) -> None:
    """Refuses an init that cannot give every tensor a value."""
    if init == "empty":
        for each in modules:
            lost = [n for n in each.own if n in each.module._non_persistent_buffers_set]
            if lost:
                raise DispatchError(
                    f"dcpc.materialize(init='empty'): got {each}, which has the buffer "
                    f"'{lost[0]}' on the meta device that no checkpoint has (persistent=False); "
                    "expected buffers that a checkpoint fills; pass a function as init= that fills "
                    "it, and load the checkpoint after it"
                )
        return
    if init is not None and not callable(init):
        raise DispatchError(
            f"dcpc.materialize: got init={init!r}; expected None, 'empty' or a function of a "
            "module; pass one of these"
        )
    helpless = [m for m in modules if not callable(getattr(m.module, "reset_parameters", None))]
    if init is None and helpless:
        raise DispatchError(
            f"dcpc.materialize: got {helpless[0]}, which has {helpless[0].tensors} on the meta "
            f"device and no reset_parameters() ({len(helpless)} such modules); expected one that "
            "gives them values: what __init__ computes on the meta device is lost; give the class "
            "a reset_parameters, pass init= (a function of a module), or init='empty' and load a "
            "checkpoint"
        )


def _check_parameters(model: nn.Module, device: torch.device) -> None:
    """Refuses parameters of the meta device that stand for more than values of their own.

    Others, and buffers, have to be on the device that these get.
    """
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        if not t.is_meta and t.device != device:
            raise DispatchError(
                f"dcpc.materialize: got '{name}' on {t.device} beside tensors of the meta device; "
                f"expected it on {device}, where a rank computes and those get their memory; move "
                f"it there before dcpc.compile (.to('{device}'))"
            )
    seen: dict[int, tuple[str, torch.UntypedStorage]] = {}
    for name, p in model.named_parameters():
        if not p.is_meta:
            continue
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise DispatchError(
                f"dcpc.materialize: got a hook on the parameter '{name}' of the meta device; "
                "expected none: another tensor takes its place, which has no hooks; register it "
                "after dcpc.materialize"
            )
        storage = p.untyped_storage()  # kept below, so that no other has its id
        other, _ = seen.setdefault(id(storage), (name, storage))
        if other != name:
            raise DispatchError(
                f"dcpc.materialize: parameters '{other}' and '{name}' share memory on the meta "
                "device; expected each to have its own; tie them as one nn.Parameter"
            )
