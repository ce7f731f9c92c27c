"""Settings by the names that VideoSys' dynamic context parallelism (DCP) has for them.

    dynamic_sp: true                     # DCP-intra: each bucket its own SP degree
    auto_grad_accumulation: true         # DCP-inter: buckets mixed, accumulation balanced
    dynamic_recompute: true              # PAC: as little recompute as fits
    min_grad_accumulation_steps: 2
    max_grad_accumulation_steps: 16
    calculate_imbalance: true
    alloc_memory_fraction: 0.9

    settings = dcpc.Settings.from_yaml("dcp.yaml")
    compiled = dcpc.compile(model, buckets, **settings.compile_options())
    loader = dcpc.DataLoader(data, compiled, tokens_per_step=n, **settings.loader_options())

Source of the keys: VideoSys' configuration of Data-Centric Parallel.
"""

from __future__ import annotations

import reprlib
import warnings
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError

from dcpc.buckets.yaml_lines import read_yaml
from dcpc.errors import DataError, meant
from dcpc.runtime.planner.plans import Mode

_Count = Annotated[int, Field(strict=True, ge=1)]


class _SettingsFields(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    dynamic_sp: StrictBool = False
    dynamic_recompute: StrictBool = False
    auto_grad_accumulation: StrictBool = False
    min_grad_accumulation_steps: _Count = 1
    max_grad_accumulation_steps: _Count | None = None
    calculate_imbalance: StrictBool = False
    alloc_memory_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    profile_path: str | None = None
    mode: Mode | None = None


class Settings(_SettingsFields):
    """Fields of a DCP configuration.

    Attributes:
        dynamic_sp: whether each bucket has its own degree; without, `dcpc.compile` needs one.
        dynamic_recompute: whether as little as fits is recomputed; without, everything is.
        auto_grad_accumulation: whether steps mix buckets; ranks then differ in micro-batches.
        min_grad_accumulation_steps: minimum micro-batches of the rank that has most.
        max_grad_accumulation_steps: maximum micro-batches of the rank that has most.
        calculate_imbalance: whether each step's predicted waste is logged.
        alloc_memory_fraction: fraction of the device's memory to use.
        profile_path: path that is not needed: nothing is profiled by running.
        mode: mode of the loader, in place of the one by the other fields; "auto": dcpc's planner.
    """

    def __init__(self, **fields: Any) -> None:
        """Takes the fields by name.

        Raises:
            DataError: a name or a value is wrong.
        """
        try:
            super().__init__(**fields)
        except ValidationError as e:
            names = tuple(type(self).model_fields)
            problems = [f"Settings: {_problem(error, names)}" for error in e.errors()]
            raise DataError("\n".join(problems)) from None

    @classmethod
    def from_yaml(cls, file: str | Path) -> Self:
        """Returns the settings in a YAML file.

        Warns of a profile_path, which is not read, and of fields without effect.

        Raises:
            DataError: the file is no mapping, or a key or value is wrong; with its line.
        """
        document = read_yaml(file, DataError)
        data = {} if document.data is None else document.data
        if not isinstance(data, dict):
            raise DataError(
                f"{document.place(())}: got {reprlib.repr(data)}; expected `name: value` pairs; "
                f"write some of {', '.join(cls.model_fields)}"
            )
        try:
            _SettingsFields.model_validate(data)
        except ValidationError as e:
            problems = [
                f"{document.place(error['loc'][:1])}: {_problem(error, tuple(cls.model_fields))}"
                for error in e.errors()
            ]
            raise DataError("\n".join(problems)) from None
        settings = cls(**data)
        settings._warn(str(file))
        return settings

    def compile_options(self) -> dict[str, Any]:
        """Returns keyword arguments for `dcpc.compile`."""
        options: dict[str, Any] = {"recompute": "pyramid" if self.dynamic_recompute else "all"}
        if self.alloc_memory_fraction is not None:
            options["memory"] = float(self.alloc_memory_fraction)
        return options

    def loader_options(self) -> dict[str, Any]:
        """Returns keyword arguments for `dcpc.DataLoader`."""
        mode = self.mode or ("inter" if self.auto_grad_accumulation else "intra")
        options: dict[str, Any] = {"mode": mode, "calculate_imbalance": self.calculate_imbalance}
        if mode != "intra":
            options["min_grad_accumulation_steps"] = self.min_grad_accumulation_steps
            options["max_grad_accumulation_steps"] = self.max_grad_accumulation_steps
        return options

    def _warn(self, file: str) -> None:
        if self.profile_path is not None:
            warnings.warn(
                f"{file}: profile_path={self.profile_path!r} is not read: dcpc derives costs from "
                "the traced graph and needs no profile; remove it",
                stacklevel=3,
            )
        if not self.dynamic_sp:
            warnings.warn(
                f"{file}: dynamic_sp is false: pass the one degree as dcpc.compile(sp=...), which "
                "otherwise chooses one for each bucket; or set dynamic_sp: true",
                stacklevel=3,
            )
        bounded = {"min_grad_accumulation_steps", "max_grad_accumulation_steps"}
        if self.loader_options()["mode"] == "intra" and bounded & self.model_fields_set:
            warnings.warn(
                f"{file}: {' and '.join(sorted(bounded & self.model_fields_set))} have no effect "
                "without auto_grad_accumulation; set it, or remove them",
                stacklevel=3,
            )


def _problem(error: Any, names: tuple[str, ...]) -> str:
    name = str(error["loc"][0])
    if error["type"] == "extra_forbidden":
        hint = meant(name, names, "remove it")
        return f"got the key {name!r}; expected one of {', '.join(names)}; {hint}"
    got = reprlib.repr(error["input"])
    return f"{name}: got {got}; expected: {error['msg'].lower()}; correct this value"
