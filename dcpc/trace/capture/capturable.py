"""Replaces functions that torch cannot capture by the same formulas in other ops.

    gaussian_nll_loss                 ->  without its check that no variance is below 0
    margin_ranking_loss (none, sum)   ->  plain ops: torch's decomposition takes no such reduction
    hinge_embedding_loss (none, sum)  ->  the same
    multilabel_margin_loss            ->  plain ops: torch's decomposition counts what follows -1
    l1_loss with a weight             ->  plain ops: torch drops the weight under such a mode
    take_along_dim                    ->  expand, gather: its C++ reads sizes as integers
    max_pool1d                        ->  max_pool1d_with_indices: it fixes the length
    std_mean of a dim                 ->  std, var_mean: torch's decomposition has other arguments
    pad(x, mode="circular")           ->  cat of the ends and x: torch's writes to an empty tensor
    pad(x, value=h / 8)               ->  the same: torch's fixes the value
    chunk, tensor_split of a length   ->  pieces of given sizes: to count them torch fixes it
    linspace of a length              ->  an op that asks torch when it runs: torch's fixes it
    attention with scale=1 / h        ->  the query by 1 / h, scale=1: torch's fixes the scale
    attention with a mask of numbers  ->  where torch has no fused kernel: matmul, softmax, matmul
    gru_cell and its kin              ->  under autocast: their parts, which it casts, not the whole
    repeat_interleave's output_size   ->  without, where it is right: torch 2.11 fixes the length
    cross_entropy of probabilities    ->  plain ops where torch fixes the number of rows (2.11)
    ctc_loss                          ->  one op, whose saved values have sizes made of dims
    batch_norm in training            ->  its running statistics by plain ops: `statistics.py`
    embedding of ids that are floats  ->  an error on torch 2.11, too
    embedding with sparse=True        ->  without: its gradient is the same, and dense
    einsum, inner, tensordot          ->  under autocast: of its dtype, to which it casts within
    losses of rows, mirrored ends     ->  under autocast: of float32, to which it casts within
    windows, fftfreq, kron, grids     ->  of a length: see `trace/formulas/`, as torch's fix it

Calls of other kinds are torch's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from dcpc.errors import running_line
from dcpc.fx.torch_api.tracing import L1_CODE, drops_weights
from dcpc.ops.positions import linspace
from dcpc.trace.formulas.chosen_rows import CHOSEN, mask_of, note_made
from dcpc.trace.formulas.ctc_losses import CTC
from dcpc.trace.formulas.known_values import NUMBERS, known
from dcpc.trace.formulas.lookups import LOOKUPS
from dcpc.trace.formulas.made_of_sizes import FORMULAS
from dcpc.trace.formulas.row_calls import call_of_rows
from dcpc.trace.formulas.soft_targets import soft_targets
from dcpc.trace.formulas.under_autocast import apart, einsum, in_float32, product
from dcpc.trace.statistics import batch_norm
from dcpc.trace.value_branches import MOST_ASKS, Branching, asks, has_values
from dcpc.trace.value_checks import asked_by_torch, passing

aten = torch.ops.aten


def _reduced(each: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return each
    return each.mean() if reduction == "mean" else each.sum()


def _gaussian_nll(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Any:
    """Returns the loss. A variance below 0, which torch refuses, counts as `eps`."""
    if isinstance(var, float) or reduction not in ("none", "mean", "sum"):
        return NotImplemented
    if var.ndim == input.ndim - 1:
        var = var.unsqueeze(-1)
    # The gradient passes by the clamp, as torch's in-place one is not differentiated.
    held = var.detach().clamp(min=eps) + (var - var.detach())
    each = 0.5 * (torch.log(held) + (input - target) ** 2 / held)
    return _reduced(each + 0.5 * math.log(2 * math.pi) if full else each, reduction)


def _margin_ranking(
    input1: Tensor,
    input2: Tensor,
    target: Tensor,
    margin: float = 0.0,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    old = size_average is not None or reduce is not None
    if old or reduction not in ("none", "sum") or not input1.ndim == input2.ndim == target.ndim:
        return NotImplemented
    return _reduced((-target * (input1 - input2) + margin).clamp_min(0), reduction)


def _hinge_embedding(
    input: Tensor,
    target: Tensor,
    margin: float = 1.0,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    if size_average is not None or reduce is not None or reduction not in ("none", "sum"):
        return NotImplemented
    far = torch.where(target != 1, (margin - input).clamp_min(0), 0)
    return _reduced(far + torch.where(target != -1, input, 0), reduction)


def _multilabel_margin(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    """Returns the loss of the labels before the first -1 of each row."""
    if size_average is not None or reduce is not None:
        reduction = torch.nn._reduction.legacy_get_string(size_average, reduce)
    if input.shape != target.shape:
        return NotImplemented  # torch says what is wrong
    counts = ((target == -1).cumsum(-1) == 0).unsqueeze(-1)  # [rows, labels, 1]
    label = target.unsqueeze(-1).where(counts, 0)
    classes = input.shape[-1]
    own = (label == torch.arange(classes, device=target.device)) & counts
    far = 1 - input.gather(-1, label.squeeze(-1)).unsqueeze(-1) + input.unsqueeze(-2)
    each = far.relu().where(counts & ~own.any(-2, keepdim=True), 0)
    return _reduced(each.sum((-1, -2)) / classes, reduction)


def _multilabel_margin_of(input: Tensor, target: Tensor, reduction: int = 1) -> Any:
    """Returns the same loss for a numbered reduction, as in Dynamo's graphs."""
    return _multilabel_margin(input, target, reduction=("none", "mean", "sum")[reduction])


def _l1(  # type: ignore[no-untyped-def] # its code runs among the globals of torch.nn.functional
    input, target, size_average=None, reduce=None, reduction="mean", weight=None
):
    """Returns `F.l1_loss` as without a mode. Its code runs with the global `torch` alone."""
    if size_average is not None or reduce is not None:
        reduction = torch.nn._reduction.legacy_get_string(size_average, reduce)
    number = torch.nn._reduction.get_enum(reduction)
    if weight is not None and weight.size() != input.size():
        raise ValueError("Weights and input must have the same size.")
    input, target = torch.broadcast_tensors(input, target)
    if weight is None:
        return torch.ops.aten.l1_loss.default(input, target, number)
    each = (input - target).abs() * weight
    if reduction == "none":
        return each
    return each.sum() / weight.sum() if reduction == "mean" else each.sum()


def _take_along(input: Tensor, indices: Tensor, dim: int | None = None) -> Any:
    if dim is None or input.ndim != indices.ndim:
        return NotImplemented
    along = dim % input.ndim

    def expanded(x: Tensor, other: Tensor) -> Tensor:
        ones = [d != along and isinstance(n, int) and n == 1 for d, n in enumerate(x.shape)]
        pairs = zip(ones, x.shape, other.shape, strict=True)
        return x.expand([theirs if one else own for one, own, theirs in pairs])

    return expanded(input, indices).gather(along, expanded(indices, input))


def _std_mean(*args: Any, **kwargs: Any) -> Any:
    return torch.std(*args, **kwargs), torch.var_mean(*args, **kwargs)[1]


def _max_pool(*args: Any, return_indices: bool = False, **kwargs: Any) -> Any:
    if kwargs.get("stride", 0) is None:
        del kwargs["stride"]
    both = torch.max_pool1d_with_indices(*args, **kwargs)
    return both if return_indices else both[0]


def _pad(x: Tensor, pad: list[int], mode: str = "constant", value: Any = None) -> Any:
    """Returns x padded circularly or by a symbolic number. `pad` starts with the last dim."""
    given = [n for n in pad if isinstance(n, int) and n >= 0]
    counted = mode == "constant" and isinstance(value, (torch.SymFloat, torch.SymInt))
    if len(given) < len(pad) or not (counted or mode == "circular"):
        return NotImplemented

    def end(x: Tensor, dim: int, start: Any, count: int) -> Tensor:
        if not counted:
            return x.narrow(dim, start, count)
        return x.new_full([count if d == dim else n for d, n in enumerate(x.shape)], value)

    for i, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        dim = x.ndim - 1 - i
        parts = [end(x, dim, x.shape[dim] - before, before)] if before else []
        parts += [x, *([end(x, dim, 0, after)] if after else [])]
        x = torch.cat(parts, dim) if len(parts) > 1 else x
    return x


def _chunk(x: Tensor, chunks: int, dim: int = 0) -> Any:
    """Returns `chunks` pieces of ceil(n / chunks), the last one shorter; else NotImplemented."""
    size = x.shape[dim] if x.ndim else 0
    if not isinstance(size, torch.SymInt) or not isinstance(chunks, int) or chunks < 1:
        return NotImplemented
    if not statically_known_true(size > (chunks - 1) ** 2):  # fewer, at some length: 5 in 4 are 3
        return NotImplemented
    piece = (size + chunks - 1) // chunks
    return x.split_with_sizes([*[piece] * (chunks - 1), size - (chunks - 1) * piece], dim)


def _tensor_split(x: Tensor, indices_or_sections: Any, dim: int = 0) -> Any:
    """Returns `count` pieces whose lengths differ by at most 1, the longer ones first."""
    size, count = x.shape[dim] if x.ndim else 0, indices_or_sections
    if not isinstance(size, torch.SymInt) or not isinstance(count, int) or count < 1:
        return NotImplemented
    pieces = [(size + count - 1 - i) // count for i in range(count)]
    starts = accumulate(pieces[:-1], initial=0)
    return tuple(x.narrow(dim, a, n) for a, n in zip(starts, pieces, strict=True))


def _repeat_interleave(
    input: Tensor, repeats: Any = None, dim: int | None = None, *, output_size: Any = None
) -> Any:
    if output_size is None or not isinstance(repeats, int | torch.SymInt):
        return NotImplemented
    size = input.numel() if dim is None else input.shape[dim]
    if not statically_known_true(output_size == size * repeats):
        return NotImplemented  # torch says what is wrong
    return torch.repeat_interleave(input, repeats, dim)


def _linspace(
    start: Any,
    end: Any,
    steps: Any,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
    requires_grad: bool = False,
    **more: Any,
) -> Any:
    """Returns `steps` floats, for a symbolic number of steps; else NotImplemented."""
    dtype = dtype or torch.get_default_dtype()
    tensors = isinstance(start, Tensor) or isinstance(end, Tensor)
    if not isinstance(steps, torch.SymInt) or tensors or requires_grad or more:
        return NotImplemented
    if not dtype.is_floating_point:
        return NotImplemented
    place = torch.get_default_device() if device is None else torch.device(device)
    return linspace(start, end, steps, dtype, place)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: Any = None,
    enable_gqa: bool = False,
) -> Any:
    """Returns attention in full precision; NotImplemented for lower ones, which round differently.

    With a learned bias the CPU takes torch's math kernel, a GPU one with another memory layout,
    after which other reshapes would be captured. So both take the math kernel here.
    """
    full = query.dtype in (torch.float32, torch.float64)
    if query.is_cuda and attn_mask is not None and attn_mask.requires_grad and not full:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal,
                scale=scale, enable_gqa=enable_gqa,
            )  # fmt: skip
    if not full or torch.is_autocast_enabled(query.device.type):
        return NotImplemented
    if isinstance(scale, torch.SymFloat):
        query, scale = query.mul(scale), 1.0
    elif attn_mask is None or dropout_p:
        return NotImplemented
    rest: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    given = query, key, value, attn_mask
    if attn_mask is None or dropout_p or not _is_math(given, enable_gqa):
        return F.scaled_dot_product_attention(*given, dropout_p, is_causal, **rest)
    groups = query.shape[-3] // key.shape[-3] if enable_gqa else 1
    if groups != 1:
        key, value = (x.repeat_interleave(groups, -3) for x in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    return torch._safe_softmax(scores + attn_mask, -1) @ value


def _is_math(given: Sequence[Tensor | None], grouped: bool) -> bool:
    """Whether torch computes attention with this mask by its math kernel, and not by the fused one.

    Where a mask hides all scores of a row (-1e30) the fused kernel has other gradients (torch 2.13
    takes each weight as 1). The choice depends on strides, which a graph does not keep.
    """
    tensors = [x for x in given if x is not None]
    mask = tensors[-1]
    if mask.dtype != tensors[0].dtype or mask.device.type != "cpu":
        return False
    if not isinstance(tensors[0].shape[-1], int):
        return False

    def number(n: Any) -> int:
        return int(n.node.hint) if isinstance(n, torch.SymInt) else int(n)

    with _disable_current_modes():
        probes = [
            torch.empty_strided(
                [number(n) for n in x.shape], [number(n) for n in x.stride()], dtype=x.dtype
            )
            for x in tensors
        ]
        q, k, v, mask = probes
        return not torch._fused_sdp_choice(q, k, v, mask, enable_gqa=grouped)


def _padded(x: Tensor, pad: list[int], mode: str = "constant", value: Any = None) -> Any:
    """Returns x with its ends mirrored or repeated, in float32 under autocast."""
    found = _pad(x, pad, mode, value)
    if found is not NotImplemented or mode not in ("reflect", "replicate"):
        return found
    return in_float32(F.pad)(x, pad, mode, value)


_INSTEAD: Mapping[Any, Callable[..., Any]] = {
    **CTC,
    **FORMULAS,
    **LOOKUPS,
    F.gaussian_nll_loss: _gaussian_nll,
    F.margin_ranking_loss: in_float32(F.margin_ranking_loss, _margin_ranking),
    F.hinge_embedding_loss: in_float32(F.hinge_embedding_loss, _hinge_embedding),
    F.multilabel_margin_loss: in_float32(F.multilabel_margin_loss, _multilabel_margin),
    torch._C._nn.multilabel_margin_loss: _multilabel_margin_of,
    F.batch_norm: batch_norm,
    torch.take_along_dim: _take_along,
    Tensor.take_along_dim: _take_along,
    F.cross_entropy: in_float32(F.cross_entropy, soft_targets),
    F.nll_loss: in_float32(F.nll_loss),
    F.max_pool1d: _max_pool,
    F.pad: _padded,
    F.scaled_dot_product_attention: _attention,
    torch.einsum: einsum,
    torch.inner: product(torch.inner),
    torch.tensordot: product(torch.tensordot),
    torch.gru_cell: apart(aten.gru_cell.default),
    torch.linspace: _linspace,
    torch.lstm_cell: apart(aten.lstm_cell.default),
    torch.max_pool1d: _max_pool,
    torch.repeat_interleave: _repeat_interleave,
    Tensor.repeat_interleave: _repeat_interleave,
    torch.rnn_relu_cell: apart(aten.rnn_relu_cell.default),
    torch.rnn_tanh_cell: apart(aten.rnn_tanh_cell.default),
    torch.std_mean: _std_mean,
    torch.chunk: _chunk,
    Tensor.chunk: _chunk,
    torch.tensor_split: _tensor_split,
    Tensor.tensor_split: _tensor_split,
}


class Capturable(TorchFunctionMode):
    """Calls these formulas in place of torch's functions while a model is captured.

    Args:
        sides: answers to questions for values; None: torch refuses these.

    Attributes:
        numbers: source lines of forward that read a Python number from a tensor.
        checks: source lines that check values and raise, which no graph does.
    """

    def __init__(self, sides: Branching | None = None) -> None:
        super().__init__()
        self._sides, self._asked = sides, 0
        self.numbers: list[str] = []
        self.checks: list[str] = []

    def __enter__(self) -> Self:
        """Begins, and swaps the code of `F.l1_loss`, which drops its weight before any mode."""
        self._swapped = L1_CODE.put(_l1.__code__) if drops_weights() else nullcontext()
        self._swapped.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        """Ends, and restores `F.l1_loss`."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._swapped.__exit__(None, None, None)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Returns the result of the replacement, or of the function itself."""
        kwargs = kwargs or {}
        found = self._called(func, args, kwargs)
        note_made(found, func, args, kwargs)
        return found

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        if (found := known(func, args, kwargs)) is not NotImplemented:
            return found
        mask = mask_of((args, kwargs))
        if func in CHOSEN or (mask is not None and func in CTC):
            found = {**CHOSEN, **CTC}[func](*args, **kwargs)
            if found is not NotImplemented:
                return found
        if mask is not None:
            return call_of_rows(func, args, kwargs, mask)
        if func in _INSTEAD:
            found = _INSTEAD[func](*args, **kwargs)
            if found is not NotImplemented:
                return found
        if asks(func, args) and (answer := self._answer(args)) is not None:
            return answer
        if func in NUMBERS:
            self.numbers.append(running_line())
        return func(*args, **kwargs)

    def _answer(self, args: tuple[Any, ...]) -> bool | None:
        """Returns the answer to a question for values, None where torch has it or refuses it."""
        if (passed := passing()) is not None:
            self.checks.append(running_line())
            return passed
        self._asked += 1
        torchs = has_values(args) or asked_by_torch()
        if self._sides is None or torchs or self._asked > MOST_ASKS:
            return None
        return self._sides.answer(running_line())
