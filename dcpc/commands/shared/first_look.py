"""Buckets for a first look at a model: its inputs as forward's signature names them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from torch import nn

from dcpc.buckets import Buckets
from dcpc.errors import BucketError

TOKENS = "int64[batch, seq]"
# Names of token ids and of what is predicted, as models have them; the first that is there counts.
IDS = ("input_ids", "token_ids", "tokens", "ids", "idx")
LABELS = ("labels", "targets", "target", "label_ids")
# So called are token ids of some models, and vectors of others: taken where there is an embedding.
EITHER_IDS, EITHER_LABELS = ("inputs", "input", "x", "src"), ("y", "tgt")
# Taken where forward needs them.
BESIDE = ("attention_mask", "position_ids", "token_type_ids")
# What a file is shown with where nothing is known of an input.
UNKNOWN = "float32[batch, seq, 64]"


@dataclass(frozen=True, slots=True)
class FirstLook:
    """Buckets that were made from a signature.

    Attributes:
        buckets: buckets of the lengths asked for.
        said: assumptions about the inputs, as text.
    """

    buckets: Buckets
    said: str


def lengths_of(text: str) -> list[int]:
    """Returns the lengths that a text such as `512,2048` stands for.

    Raises:
        BucketError: the text is not of this form, or a length is there twice.
    """
    parts = [part.strip() for part in text.split(",")]
    found = [int(part) for part in parts if part.isdecimal()]
    if len(found) < len(parts) or len({*found}) < len(found) or 0 in found:
        raise BucketError(
            f"got --seq {text}; expected lengths from 1 up, each once, separated by commas, such "
            "as 512,2048; correct it"
        )
    return found


def first_look(model: nn.Module, text: str) -> FirstLook:
    """Returns buckets of these lengths for a model of token ids, and the assumed inputs as text.

    Args:
        model: model whose forward takes ids of `[batch, seq]`, and labels of the same shape if any.
        text: lengths of `seq`, such as `512,2048`.

    Raises:
        BucketError: the lengths are none, or forward needs an input that is not known by its name.
    """
    sizes = [{"seq": length} for length in lengths_of(text)]
    shown, needed, optional = _arguments(model)
    embeds = any(isinstance(module, nn.Embedding) for module in model.modules())
    names = {*needed, *optional}
    ids = _first((*IDS, *(EITHER_IDS if embeds else ())), names)
    labels = _first((*LABELS, *(EITHER_LABELS if embeds else ())), names)
    known = [name for name in (ids, labels) if name]
    known += [name for name in BESIDE if name in needed]
    unknown = [name for name in needed if name not in known]
    if not ids or unknown:
        unknown = unknown or [name for name in optional if name != labels][:1]
        inputs = {name: TOKENS if name in known else UNKNOWN for name in [*known, *unknown]}
        example = _file(inputs or {"input_ids": TOKENS}, sizes, unknown)
        what = ", ".join(unknown) if ids else "no argument known for token ids"
        raise BucketError(
            f"got --seq {text} for {shown} with {what}; expected token ids ({', '.join(IDS)}) and "
            f"labels ({', '.join(LABELS)}), each [batch, seq]; write the inputs into a file for "
            f"--buckets, with their dtypes and dims, such as\n\n{example}"
        )
    buckets = Buckets(inputs=dict.fromkeys(known, TOKENS), sizes=sizes)
    assumed = _file(dict.fromkeys(known, TOKENS), sizes, [])
    return FirstLook(buckets, f"assumed from {shown}; as a file for --buckets:\n\n{assumed}\n")


def _arguments(model: nn.Module) -> tuple[str, list[str], list[str]]:
    """Returns forward as text, the arguments it needs, and those it may have."""
    parameters = inspect.signature(model.forward).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    needed = [p.name for p in named if p.default is p.empty]
    optional = [p.name for p in named if p.default is not p.empty]
    shown = needed + [f"{name}=..." for name in optional if name in IDS + LABELS]
    more = ["..."] if len(shown) < len(parameters) else []
    return f"{type(model).__name__}.forward({', '.join(shown + more)})", needed, optional


def _first(candidates: tuple[str, ...], names: set[str]) -> str:
    return next((name for name in candidates if name in names), "")


def _file(inputs: dict[str, str], sizes: list[dict[str, int]], unknown: list[str]) -> str:
    """Returns a file of buckets as a start, with a mark where something is to be corrected."""
    lines = ["inputs:"]
    for name, spec in inputs.items():
        lines.append(f"  {name}: {spec}" + "  # correct this" * (name in unknown))
    lines += ["sizes:", *(f"  - {{seq: {size['seq']}}}" for size in sizes)]
    return _indented("\n".join(lines))


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())
