"""Kinds: buckets, specs and YAML."""

from typing import Any

import numpy as np
import torch

import dcpc
from dcpc.errors import BucketError, DataError
from tests.cases.bad_input.kinds import INPUTS, Ground, Kind


def _buckets(name: str, inputs: Any, sizes: Any) -> Kind:
    return Kind(name, BucketError, lambda ground: dcpc.Buckets(inputs, sizes))


def _yaml(name: str, content: str | bytes) -> Kind:
    return Kind(name, BucketError, lambda g: dcpc.Buckets.from_yaml(g.file(content, "b ü.yaml")))


def _settings(name: str, content: str) -> Kind:
    return Kind(name, DataError, lambda g: dcpc.Settings.from_yaml(g.file(content, "dcp.yaml")))


def _to_folder(ground: Ground) -> None:
    dcpc.Buckets(INPUTS, [{"seq": 4}]).to_yaml(ground.folder)


_INPUTS = "inputs: {ids: 'int64[batch, seq]'}\n"
# Each alias stands for nine of the one before: 9**12 entries, if anything looks at all of them.
_BOMB = "sizes:\n" + "".join(
    f"- &s{i} [{','.join([f'*s{i - 1}' if i else '1'] * 9)}]\n" for i in range(12)
)

DECLARED = {
    "Buckets and specs": (
        _buckets("no inputs", {}, [{"seq": 4}]),
        _buckets("no sizes", INPUTS, []),
        Kind("three arguments", BucketError, lambda g: dcpc.Buckets(INPUTS, [{"seq": 4}], 8)),
        _buckets("a numpy array for sizes", INPUTS, np.array([4, 8])),
        _buckets("numbers for sizes", INPUTS, [4, 8]),
        _buckets("a numpy integer for a length", INPUTS, [{"seq": np.int64(4)}]),
        _buckets("a tensor for a length", INPUTS, [{"seq": torch.tensor(4)}]),
        _buckets("a fraction for a length", INPUTS, [{"seq": 4.5}]),
        _buckets("a length of 0", INPUTS, [{"seq": 0}]),
        _buckets("a length beyond all tensors", INPUTS, [{"seq": 10**30}]),
        _buckets("a length that is missing", INPUTS, [{"batch": 4}]),
        _buckets("a dim that no input has", INPUTS, [{"seq": 4, "sea": 4}]),
        _buckets("one shape twice", INPUTS, [{"seq": 4}, {"seq": 4, "batch": 2}]),
        _buckets("a dtype that torch lacks", {"ids": "int65[batch]"}, [{}]),
        _buckets("a spec that is no text", {"ids": 3}, [{}]),
        _buckets("a name that is no argument", {"my ids": "int64[batch]"}, [{}]),
        _buckets("a spec that does not end", {"ids": "int64[" + "(" * 5000}, [{}]),
        _buckets("a dim that none determines", {"ids": "int64[batch, seq//2]"}, [{"seq": 4}]),
    ),
    "YAML": (
        _yaml("an empty file", ""),
        _yaml("a list", "- 1\n"),
        _yaml("a tab", "inputs:\n\t- 1\n"),
        _yaml("a key twice", "inputs: 1\ninputs: 2\n"),
        _yaml("two documents", "a: 1\n---\nb: 2\n"),
        _yaml("no text", b"\xff\xfe\x00"),
        _yaml("a control character", "inputs: \x00"),
        _yaml("a number of 6000 digits", _INPUTS + f"sizes: [{{seq: {'9' * 6000}}}]\n"),
        _yaml("nesting of 1500 levels", "[" * 1500 + "]" * 1500),
        _yaml("aliases of aliases", _INPUTS + _BOMB),
        _yaml("an alias of what it is in", _INPUTS + "sizes: &a [*a]\n"),
        _yaml("an alias of nothing", "inputs: *a\n"),
        _yaml("Python in YAML", "!!python/object/apply:os.system ['true']\n"),
        _settings("an unknown setting", "dynamic_spp: true\n"),
        _settings("a setting of another type", "min_grad_accumulation_steps: two\n"),
        Kind("a setting that is no flag", DataError, lambda g: dcpc.Settings(dynamic_sp="x")),
        Kind("no file", BucketError, lambda g: dcpc.Buckets.from_yaml(g.folder / "none.yaml")),
        Kind("a folder for a file", BucketError, lambda g: dcpc.Buckets.from_yaml(g.folder)),
        Kind("no path", BucketError, lambda g: dcpc.Buckets.from_yaml(None)),
        Kind("a path with NUL", BucketError, lambda g: dcpc.Buckets.from_yaml("a\0b")),
        Kind("a folder to write to", BucketError, _to_folder),
    ),
}
