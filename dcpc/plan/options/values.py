"""Checks the values of options, by a `PlanError` unless said, and parses them from text."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from sympy import divisors
from torch import nn

from dcpc.buckets import Buckets
from dcpc.errors import (
    BucketError,
    GroupError,
    PlanError,
    ProfileError,
    TraceError,
    check_choice,
    meant,
)
from dcpc.symbolic_profile import DEVICES, Device, bytes_of, find
from dcpc.trace.wrappers import refuse_wrapped

# "pyramid" is VideoSys' name for what "auto" does: short samples recompute little, long ones more.
RECOMPUTE = ("auto", "pyramid", "none", "all")
AWAY = ("auto", "none", "all", "activations", "optimizer", "parameters")
DISK_BYTES_PER_S = 2e9  # assumed: an NVMe disk that others use, too
VERIFY = ("auto", "full", "off")
PARAMETERS = ("whole", "step", "pull", "rounds", "auto")
# Most NCCL process groups of a rank: each takes memory of its GPU.
MOST_COMMUNICATORS = 8
LARGEST = (1 << 63) - 1  # integers from here on fit in no tensor
AUTOCAST = {"none": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


def memory_of(memory: int | float | str | None) -> int | float | None:
    """Returns the number that a memory stands for: bytes, or up to 1.0 a share; None as it is.

    Args:
        memory: a number, or a text such as "80GB", "512MiB" or "1.5e9".

    Raises:
        PlanError: it is not a positive number.
    """
    if memory is None:
        return None
    found = bytes_of(memory) if isinstance(memory, str) else memory
    number = isinstance(found, int | float) and not isinstance(found, bool)
    if found is None or not number or not 0 < found < math.inf:
        raise PlanError(
            f"got memory={memory!r}; expected a positive number of bytes a rank may use, such as "
            "80e9, 80GB (1e9 bytes each) or 512MiB (2**20 each); correct it, or leave it out for "
            "all that the device has"
        )
    return found


def optimizer_bytes_of(text: str | None) -> int | None:
    """Returns the bytes that the command line's text stands for."""
    if text is None:
        return None
    found = bytes_of(text)
    if found is None or found == math.inf:
        raise PlanError(
            f"got --optimizer-bytes {text}; expected a number of bytes from 0, such as 2e9, 2GB or "
            "512MiB; correct it"
        )
    return int(found)


def degrees(sp: int | str | Sequence[int], world: int) -> tuple[int, ...]:
    """Returns the degrees to try, ascending; a bucket's own plan takes a divisor of `world`.

    Raises:
        PlanError: a forced value is not possible.
    """
    every = tuple(divisors(world))
    if sp == "auto":
        return every
    if isinstance(sp, Sequence) and not isinstance(sp, str):
        whole = all(isinstance(d, int) and not isinstance(d, bool) for d in sp)
        if whole and all(1 <= d <= world for d in sp) and set(sp) & set(every):
            return tuple(sorted(set(sp)))
    elif not isinstance(sp, bool) and isinstance(sp, int) and sp in every:
        return (sp,)
    raise PlanError(
        f"got sp={sp!r} with {world} ranks; expected 'auto' or a divisor of the world size "
        f"({', '.join(map(str, every))}), or degrees up to it with one of these in it; "
        "choose one, or run on a multiple of it"
    )


def few_degrees(sps: Sequence[int], world: int) -> tuple[int, ...]:
    """Returns a subset of the degrees that needs at most `MOST_COMMUNICATORS` communicators a rank.

    Two are of all ranks (the model's, and the sum of gradients), and each degree between 1 and all
    has one. Of more degrees the one goes whose neighbours are nearest to each other, again and
    again: so those that are left are spread evenly.

        48 ranks     1 2 3 4 6 8 12 16 24 48  ->  1 2 3 4 6 12 24 48
    """
    left = list(sps)
    while sum(1 < sp < world for sp in left) > MOST_COMMUNICATORS - 2:
        gaps = {i: left[i + 1] / left[i - 1] for i in range(1, len(left) - 1)}
        del left[min(gaps, key=lambda i: (gaps[i], -i))]  # of a tie the wider one
    return tuple(left)


def check_timeout(timeout: object) -> None:
    """Refuses a timeout that is not a positive number of seconds."""
    number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not number or not 0 < timeout < math.inf:  # type: ignore[operator]
        raise PlanError(
            f"got timeout={timeout!r}; expected a positive number of seconds, after which a rank "
            "without a sign of life is lost; correct it, or leave it out for 60"
        )


def one_of(name: str, known: Sequence[object]) -> Callable[[object], None]:
    """Returns a check that refuses all values of an option but some."""
    return lambda given: check_choice(f"got {name}=", given, known)


def check_tile(tile: object) -> None:
    """Refuses a tile that is neither a number of rows nor "auto" nor "none"."""
    if tile in ("auto", "none") or (type(tile) is int and tile >= 1):
        return
    raise PlanError(
        f"got tile={reprlib.repr(tile)}; expected 'auto', 'none' or the most rows of a tile, 1 or "
        f"more; {meant(tile, ('auto', 'none'), 'pass one, such as 1024')}"
    )


def parse_tile(text: str) -> int | str:
    """Returns the tile that the command line's text stands for."""
    return int(text) if text.isdecimal() else text


def host_of(host: int | float | str | None) -> int:
    """Returns the bytes of the hosts' memory that `host=` stands for; None: 0.

    Raises:
        PlanError: it is not a positive number of bytes.
    """
    found = bytes_of(host) if isinstance(host, str) else host
    number = isinstance(found, int | float) and not isinstance(found, bool)
    if host is None:
        return 0
    if not number or found is None or not 1 < found < math.inf:
        raise PlanError(
            f"got host={host!r}; expected bytes of a host's memory in which values may wait for "
            "backward, such as '400GB' or 64e9, of all its ranks together; correct it, or leave it "
            "out"
        )
    return int(found)


def away_kinds(away: str | Sequence[str]) -> tuple[str, bool, bool]:
    """Returns how activations leave ("auto", "none" or "all"), and whether the others are away.

    These are parameters, and the optimizer's state (with parameters in any case).

    Args:
        away: one of `AWAY`, or several of "activations", "optimizer" and "parameters": a sequence,
            or a text with commas.

    Raises:
        PlanError: it is something else.
    """
    names = away.split(",") if isinstance(away, str) else away
    known = isinstance(names, Sequence) and all(isinstance(n, str) for n in names)
    kinds = {n.strip() for n in names} if known else set[str]()
    if not kinds or not (kinds <= set(AWAY[3:]) or (len(kinds) == 1 and kinds <= set(AWAY))):
        wrong = next((n for n in sorted(kinds) if n not in AWAY), away)
        raise PlanError(
            f"got away={reprlib.repr(away)}; expected 'auto', 'none', 'all', or which of "
            "'activations', 'optimizer' and 'parameters' leave, as ('activations', 'optimizer'); "
            + meant(wrong, AWAY if isinstance(wrong, str) else (), "correct it")
        )
    if kinds <= set(AWAY[:3]):
        return kinds.pop(), False, False
    held = "parameters" in kinds
    return "auto" if "activations" in kinds else "none", held, held or "optimizer" in kinds


def disk_of(disk: str | None) -> tuple[str, int, float]:
    """Returns the folder, the bytes and the bytes a second that `disk=` stands for.

    None: no folder and 0 bytes.

    Raises:
        PlanError: it is not a folder that exists, with a number of bytes behind a colon.
    """
    if disk is None:
        return "", 0, DISK_BYTES_PER_S
    text = disk if isinstance(disk, str) else ""
    folder, _, size = text.rpartition(":")
    size, _, rate = size.partition("@")
    numbers = [bytes_of(size), bytes_of(rate.removesuffix("/s")) if rate else DISK_BYTES_PER_S]
    if not folder or not all(n is not None and 1 < n < math.inf for n in numbers):
        raise PlanError(
            f"got disk={reprlib.repr(disk)}; expected a folder and the bytes that files there may "
            "take, of all ranks of a host together, and how fast it is if that is not 2GB/s, as "
            "'/nvme/dcpc:2TB' or '/nvme/dcpc:2TB@5GB/s'; correct it, or leave it out"
        )
    return folder, int(numbers[0] or 0), float(numbers[1] or 0)


def check_block(block: object) -> None:
    """Refuses a block that is neither a number of ranks >= 2, nor "auto", nor None."""
    whole = isinstance(block, int) and not isinstance(block, bool) and block >= 2
    if block not in (None, "auto") and not whole:
        raise PlanError(
            f"got block={block!r}; expected a number of ranks from 2 on that divides all of them, "
            "'auto', or None for all; correct it, or take parameters='whole' for blocks of one"
        )


def block_of(block: int | None, sps: Sequence[int], world: int) -> tuple[int, tuple[int, ...]]:
    """Returns the ranks that shard parameters together, and the degrees that fit this block.

    A sequence-parallel group lies within a block, or consists of whole blocks.

    Raises:
        PlanError: the block does not divide the ranks, or no degree fits it.
    """
    if block is None or block == world:
        return world, tuple(sps)
    if world % block:
        raise PlanError(
            f"got block={block} with {world} ranks; expected a divisor of them from 2 on "
            f"({', '.join(map(str, divisors(world)[1:])) or 'none'}); "
            "choose one, or leave it out for all ranks"
        )
    fitting = fitting_degrees(block, sps, world)
    if not fitting:
        raise PlanError(
            f"got sp={', '.join(map(str, sps))} with block={block}; expected a degree that divides "
            "the block or is a multiple of it, and divides the ranks: ranks of a block gather "
            "parameters together; choose another of them"
        )
    return block, fitting


def fitting_degrees(block: int, sps: Sequence[int], world: int) -> tuple[int, ...]:
    """Returns the degrees whose groups lie within a block of ranks or are whole blocks."""
    return tuple(sp for sp in sps if world % sp == 0 and (block % sp == 0 or sp % block == 0))


def parse_block(text: str | None) -> int | str | None:
    """Returns the block that the command line's text stands for."""
    return int(text) if text is not None and text.isdecimal() else text


def check_speeds(speeds: object) -> None:
    """Refuses speeds that are neither "auto", "equal" nor positive numbers."""
    if isinstance(speeds, str) and speeds in ("auto", "equal"):
        return
    numbers = isinstance(speeds, list | tuple) and all(
        isinstance(s, int | float) and not isinstance(s, bool) and 0 < s < math.inf for s in speeds
    )
    if not numbers or not speeds:
        raise PlanError(
            f"got speeds={speeds!r}; expected 'auto', 'equal' or a positive number for each rank, "
            "such as [1.0, 0.5]; choose one"
        )


def check_pipeline(pipeline: object) -> None:
    """Refuses a value that is no number of stages, nor "auto", nor None."""
    whole = isinstance(pipeline, int) and not isinstance(pipeline, bool)
    if pipeline in (None, "auto"):
        return
    if not whole or not 2 <= int(pipeline) <= LARGEST:  # type: ignore[call-overload]
        raise PlanError(
            f"got pipeline={pipeline!r}; expected a number of stages from 2 on, or 'auto'; pass "
            "one, or leave it out for ranks that run the whole model"
        )


def check_given(model: object, buckets: object) -> None:
    """Refuses a model that is no module, and buckets that are no `Buckets`.

    Raises:
        TraceError: `model` is no `nn.Module`, or a wrapper of one.
        BucketError: `buckets` are no `Buckets`.
        PlanError: what is made from now on would be on the meta device.
    """
    if not isinstance(model, nn.Module):
        made = isinstance(model, type) and issubclass(model, nn.Module)
        got = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        function = "put the function into a module's forward"
        other = function if callable(model) else "pass the model first, then the buckets"
        raise TraceError(
            f"model: got {got}; expected a torch.nn.Module; "
            + ("call the class to make one" if made else other)
        )
    refuse_wrapped(model)
    if not isinstance(buckets, Buckets):
        raise BucketError(
            f"buckets: got {type(buckets).__name__}; expected dcpc.Buckets; pass "
            "dcpc.Buckets(inputs=..., sizes=...), or dcpc.Buckets.from_yaml(file)"
        )
    if torch.get_default_device().type == "meta":
        raise PlanError(
            "got a call under torch.device('meta'), where new tensors have no values; expected a "
            "model that was made there alone; end that block (or set_default_device) before it"
        )


def check_device(device: str | Device) -> None:
    """Refuses a device that is neither a known name nor a `Device`."""
    of_torch = isinstance(device, torch.device) or str(device).split(":")[0] in ("cuda", "mps")
    if of_torch or not isinstance(device, str | Device):
        known = ", ".join(d.name for d in DEVICES)
        where = ": device= is what costs are predicted for, and a model runs where it is" * of_torch
        raise ProfileError(
            f"device: got {reprlib.repr(device)}; expected 'auto', one of {known}, or a Device; "
            f"pass one, or leave it out{where}"
        )
    if isinstance(device, str) and device != "auto":
        find(device)


def check_count(what: str, least: int) -> Callable[[object], None]:
    """Returns a check that refuses all values but integers from `least` on."""

    def check(given: object) -> None:
        whole = isinstance(given, int) and not isinstance(given, bool)
        if not whole or not least <= int(given) <= LARGEST:  # type: ignore[call-overload]
            raise PlanError(
                f"got {what}={reprlib.repr(given)}; expected an integer from {least} to "
                f"{LARGEST}; correct it"
            )

    return check


def check_optimizer_bytes(given: int | None) -> None:
    """Refuses a value that is no number of bytes."""
    if given is not None:
        check_count("optimizer_bytes", 0)(given)


def check_group(group: object) -> None:
    """Refuses a value that is no process group."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise GroupError(
            f"got group={reprlib.repr(group)}; expected a torch.distributed.ProcessGroup that this "
            "rank is in; make one by torch.distributed.new_group, or leave it out for all ranks"
        )


def parse_degrees(text: str) -> int | str | list[int]:
    """Returns the degree, or the degrees, that a text such as `4` or `1,2,4` stands for."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        return text
    return int(text) if len(parts) == 1 else [int(part) for part in parts]


def autocast_of(name: str) -> torch.dtype | None:
    """Returns the dtype of one of `AUTOCAST`.

    Raises:
        PlanError: there is no such name.
    """
    check_choice("got --autocast ", name, AUTOCAST)
    return AUTOCAST[name]
