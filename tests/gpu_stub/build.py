"""Builds a GPU that computes nothing: `build(python, folder)` returns its environment.

`runtime.c` and `blas.c` are preloaded in place of the CUDA runtime and cuBLAS, `driver.c` is
libcuda.so.1. They hold what hands something back; every other function that this torch or its
Triton names becomes one that returns 0, so that another release of torch needs no list of names.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
# Launches of CUDA 13 pass through these two; the third would look for a GPU.
_HIDDEN = ("__cudaGetKernel", "__cudaLaunchKernel", "__cudaInitModule")
_RUNTIME = re.compile(r"(cuda[A-Z]|cublas)\w+")
_DRIVER = re.compile(rb"\bcu[A-Z][A-Za-z0-9]+(?:_v\d)?\b")


def build(python: str, folder: Path) -> dict[str, str]:
    """Builds the stub for an interpreter's torch.

    Args:
        python: an interpreter whose torch is a CUDA build.
        folder: where to.

    Returns:
        The environment variables under which that interpreter sees the card.

    Raises:
        RuntimeError: its torch is none, or has no headers of CUDA beside it.
    """
    site = _site(python)
    libraries = site / "torch" / "lib"
    headers = sorted((site / "nvidia").glob("*/include/cuda_runtime_api.h"))
    triton = site / "triton" / "backends" / "nvidia"
    if not (libraries / "libtorch_cuda.so").exists() or not headers:
        raise RuntimeError(
            f"{python}: got a torch without CUDA, or without its headers; expected a CUDA build "
            "with the nvidia-cuda-runtime package that it comes with; pass another GPU_STUB_PYTHON"
        )
    folder.mkdir(parents=True, exist_ok=True)
    # Triton has the folder crt of nvcc, which the runtime's package leaves out.
    include = [f"-I{p}" for p in (HERE, headers[0].parent, triton / "include")]
    torchs = ("c10_cuda", "torch_cuda", "torch_cuda_linalg")
    undefined = {n for name in torchs for n in _undefined(libraries / f"lib{name}.so")}
    called = {n for n in undefined if _RUNTIME.fullmatch(n)} | undefined.intersection(_HIDDEN)
    runtime = _library("runtime", called, folder, [str(HERE / "blas.c"), *include, "-ldl"])
    looked_up = set(_undefined(libraries / "libcaffe2_nvrtc.so"))
    for file in (libraries / "libc10_cuda.so", triton / "driver.c"):
        looked_up |= {n.decode() for n in _DRIVER.findall(file.read_bytes())}
    driver = {n for n in looked_up if _DRIVER.fullmatch(n.encode())}
    built = _library("driver", driver, folder, [*include, "-Wl,-soname,libcuda.so.1"])
    for name in ("libcuda.so.1", "libcuda.so"):
        link = folder / f"{name}.{os.getpid()}"
        link.symlink_to(built.name)
        link.replace(folder / name)
    return {
        "LD_PRELOAD": str(runtime),
        "LD_LIBRARY_PATH": str(folder),
        "TRITON_LIBCUDA_PATH": str(folder),
        "CUDA_VISIBLE_DEVICES": "0",
    }


def _site(python: str) -> Path:
    code = "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    if found.returncode:
        raise RuntimeError(f"{python}: got {found.stderr.strip()[-300:]}; expected one with torch")
    return Path(found.stdout.strip()).parent


def _undefined(library: Path) -> list[str]:
    return _names(library, "--undefined-only")


def _names(library: Path, which: str) -> list[str]:
    """Returns the symbols of a library, without their versions."""
    command = ["nm", "-D", which, str(library)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    return [line.split()[-1].partition("@")[0] for line in found.stdout.splitlines()]


def _library(name: str, called: Iterable[str], folder: Path, options: list[str]) -> Path:
    """Returns the library of a source and of the functions that are called and not in it.

    It takes its place once it is whole: processes of another build may begin meanwhile.
    """
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made, rest = Path(scratch) / "made.so", Path(scratch) / "rest.c"
        compiler = ["gcc", "-shared", "-fPIC", "-O1", "-w", "-o", made, HERE / f"{name}.c"]
        subprocess.run([*compiler, *options], check=True)
        missing = sorted(set(called) - set(_names(made, "--defined-only")))
        rest.write_text("".join(f"int {n}(void) {{ return 0; }}\n" for n in missing))
        subprocess.run([*compiler, rest, *options], check=True)
        return made.replace(folder / f"lib{name}.so")


def environment(python: str, folder: Path) -> dict[str, str]:
    """Returns this process's environment and that of the card."""
    return {**os.environ, **build(python, folder)}
