"""The planner's request: the options, with the bytes of a model and its optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from dcpc.codegen import LOOSE, PAGE_BYTES, text_of
from dcpc.errors import PlanError
from dcpc.plan.options import (
    PlanOptions,
    away_kinds,
    block_of,
    degrees,
    disk_of,
    few_degrees,
    host_of,
    memory_of,
)
from dcpc.plan.planning import PlanRequest
from dcpc.runtime.groups.launch import local_device
from dcpc.runtime.parameters.away_state import STATE_RUN_BYTES
from dcpc.runtime.parameters.modes import shares
from dcpc.runtime.parameters.reduction import COMM_BUCKET_BYTES
from dcpc.symbolic_profile import (
    Away,
    Device,
    OptimizerMemory,
    bytes_text,
    detect,
    find,
    rounded,
)


def request_of(
    model: nn.Module, options: PlanOptions, sps: tuple[int, ...], target: Device
) -> PlanRequest:
    """Returns the planner's request: the options, with the model's bytes."""
    world = options.world
    optimizer = OptimizerMemory(options.optimizer, options.optimizer_bytes, target.gpu)
    mode = mode_of(options)
    owners = world  # of a parameter's rows
    if mode == "rounds" or options.block is not None:
        assert not isinstance(options.block, str), "it is chosen"
        owners, sps = block_of(options.block, sps, world)
    _refuse_on_gpu(options, mode, target)
    whole = list(model.parameters())
    own = whole if mode == "whole" else shares(whole, owners)
    activations, held_away, state_away = away_kinds(options.away)
    held, buffers, gradients, states = _residents(model, own, optimizer, mode)
    # The optimizer steps where parameters are, so their gradients and its state lie there too.
    away_residents = [*held, *gradients, *states] if held_away else states if state_away else []
    residents = buffers if held_away else [*held, *buffers, *gradients]
    residents += [] if state_away else states
    held_bytes = sum(rounded(size_bytes, PAGE_BYTES) for size_bytes in away_residents)
    rows_bytes = sum(p.nbytes for p in own if p.requires_grad)
    among = communicators(sps, world) if target.communicator_bytes else 0
    room_bytes = _room_bytes(options, away := away_of(options, target), held_bytes)
    return PlanRequest(
        sps=sps,
        recompute_mode=options.recompute_mode,
        memory_bytes=rank_memory_bytes(options.memory, target, world, among),
        resident_bytes=sum(rounded(size_bytes, target.block_bytes) for size_bytes in residents),
        world=world,
        residents=tuple(residents),
        step_bytes=max(
            _step_bytes(own, optimizer, target, held_away, state_away),
            # A comm bucket on its way to the other blocks lies beside the gradients.
            min(rows_bytes, COMM_BUCKET_BYTES) if owners < world else 0,
        ),
        parameters=mode,
        block=owners if mode == "rounds" else 0,
        gradient_bytes=rows_bytes,
        communicators=among,
        optimizer=optimizer,
        tile=options.tile,
        away_bytes=0 if activations == "none" else room_bytes,
        all_leave=activations == "all",
        held_away=away.store if held_away and away is not None else "",
        state_away=away.store if state_away and away is not None else "",
        held_away_bytes=held_bytes,
    )


def _refuse_on_gpu(options: PlanOptions, mode: str, target: Device) -> None:
    """Refuses ways to hold parameters and states that are a CPU's alone."""
    if not target.gpu:
        return
    if away_kinds(options.away)[1:] == (False, True) and options.world > 1:
        raise PlanError(
            f"got away={options.away!r} for {options.world} ranks of {target.name}; expected "
            "'parameters' with it: a state whose rows are shared out lies where its parameters do; "
            "take away=('activations', 'parameters')"
        )
    if mode == "pull":
        raise PlanError(
            f"got parameters='pull' for {target.name}; expected a CPU, whose ranks map the same "
            "memory; take 'step'"
        )


def mode_of(options: PlanOptions) -> str:
    """Returns how ranks hold parameters; a rank alone has all of them unless they are away."""
    held = options.held
    return held if options.world > 1 or away_kinds(options.away)[1] else "whole"


def away_of(options: PlanOptions, target: Device) -> Away | None:
    """Returns a rank's share of where saved values may wait for backward; None: they stay."""
    ranks = min(options.world, target.node_ranks)
    folder, disk_bytes, rate = disk_of(options.disk)
    shares = host_of(options.host) // ranks, disk_bytes // ranks
    if options.away == "none" or not any(shares):
        return None
    return Away(text_of(shares[0], folder, shares[1]), *shares, rate)


def _room_bytes(options: PlanOptions, away: Away | None, held_bytes: int) -> int:
    """Returns the bytes that plans may fill of a rank's share, beside those of parameters there.

    Raises:
        PlanError: it has no room for that.
    """
    most_bytes = 0 if away is None else int(away.most_bytes / LOOSE)
    if held_bytes > most_bytes:
        raise PlanError(
            f"got away={options.away!r} with host= and disk= of which a rank may fill "
            f"{bytes_text(most_bytes)}; expected {bytes_text(held_bytes)} for its part of "
            "parameters, their gradients and the optimizer's state (a rank fills four fifths of "
            "its share); raise host= or disk="
        )
    return most_bytes - held_bytes


def _step_bytes(
    own: Sequence[nn.Parameter],
    optimizer: OptimizerMemory,
    target: Device,
    held_away: bool,
    state_away: bool,
) -> int:
    """Returns the bytes that an optimizer's step takes; with a state that is away those of a run.

    A GPU whose parameters are away takes none: where they are, the CPU steps.
    """
    if target.gpu and held_away:
        return 0
    if not state_away:
        return optimizer.step_bytes(own)
    sizes = [p.nbytes for p in own if p.requires_grad]
    run_bytes = max(max(sizes, default=0), min(sum(sizes), STATE_RUN_BYTES))
    return min(optimizer.step_bytes(own), 4 * run_bytes) + 2 * run_bytes


def communicators(sps: Sequence[int], world: int) -> int:
    """Returns the most process groups that a rank is in: of all ranks, of gradients, of degrees."""
    return 2 + sum(1 < sp < world for sp in sps) if world > 1 else 0


def device_of(model: nn.Module) -> torch.device | None:
    """Returns where the model is; one on the meta device gets its memory where a rank computes."""
    parameter = next(iter(model.parameters()), None)
    if parameter is None:
        return None
    return local_device(None) if parameter.is_meta else parameter.device


def target_of(device: str | Device) -> Device:
    """Returns the device that costs are predicted for; "auto": this machine's."""
    if isinstance(device, Device):
        return device
    return detect() if device == "auto" else find(device)


def _residents(
    model: nn.Module, own: Sequence[nn.Parameter], optimizer: OptimizerMemory, mode: str
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Returns the bytes of each parameter, buffer, gradient and tensor of the optimizer's state."""
    whole = list(model.parameters())
    held = own if mode in ("pull", "rounds") else whole
    # "pull": a rank's part of the sum of all ranks, and then its own rows of it.
    gradients = [p.nbytes for p in held if p.requires_grad] * (2 if mode == "pull" else 1)
    if mode == "step":  # one comm bucket on its way: what is sent, and what arrives
        trained_bytes = sum(p.nbytes for p in whole if p.requires_grad)
        gradients += [min(trained_bytes, COMM_BUCKET_BYTES)] * 2
    states: list[int] = []
    if optimizer.given_bytes is not None:
        states.append(optimizer.given_bytes)
    else:
        kept = optimizer.state_bytes(whole, own)
        for p in own:  # what is as large as the parameter, and the rest
            count, rest = divmod(kept.get(id(p), 0), max(p.nbytes, 1))
            states += [p.nbytes] * count + [rest]
    return [p.nbytes for p in held], [b.nbytes for b in model.buffers()], gradients, states


def rank_memory_bytes(
    memory: int | float | str | None, device: Device, world: int, among: int | None = None
) -> int:
    """Returns the bytes that a rank may use for tensors.

    Args:
        memory: bytes, also as a text such as "80GB"; or a share of what the device has, up to 1.0;
            None: all of it. What communicators take is off the device's, not off bytes.
        device: device that is planned for.
        world: ranks; they share the memory of a CPU.
        among: communicators of a rank; None: those of every degree that plans have by default.

    Raises:
        PlanError: `memory` is not a positive number.
    """
    memory = memory_of(memory)
    have_bytes = device.memory_bytes // (world if device.name == "cpu" else 1)
    if device.communicator_bytes:
        usual = communicators(few_degrees(degrees("auto", world), world), world)
        have_bytes -= (usual if among is None else among) * device.communicator_bytes
    if memory is None:
        return have_bytes
    if isinstance(memory, float) and memory <= 1.0:
        return int(memory * have_bytes)
    return int(memory)
