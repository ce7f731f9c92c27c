"""Rates of devices and their links; each constant's unit is in its name, its source here.

Figures of data sheets are peaks: seconds predicted from them are a lower bound, and the order of
two plans is more to be trusted than either's seconds. "assumed" marks a figure without a source.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

from dcpc.errors import ProfileError, check_choice
from dcpc.ops.attention import Capability
from dcpc.symbolic_profile.memory.allocator import BLOCK_BYTES
from dcpc.symbolic_profile.seconds.fits import Fits

TFLOP = 1e12
GB = 1e9


@dataclass(frozen=True, slots=True)
class Link:
    """Time of a message between ranks: alpha_s + bytes / bytes_per_s, each way.

    Attributes:
        alpha_s: seconds of an empty collective.
        bytes_per_s: bytes a rank sends in a second.
    """

    alpha_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Device:
    """One rank's device.

    Attributes:
        name: name to show a person, which `find` looks up.
        flops_per_s: (dtype, FLOP/s) of dense matmuls.
        vector_flops_per_s: FLOP/s of everything but matmuls, float32.
        memory_bytes_per_s: bytes read or written in a second.
        memory_bytes: memory of the device.
        launch_s: minimum seconds of an op.
        node_ranks: ranks that `inside` joins; a larger group uses `across`.
        inside: link within a node.
        across: link between nodes.
        overlaps: whether it sends while it computes, as a GPU does.
        gpu: whether ops run a GPU's kernels, which need other memory than the CPU's.
        capability: compute capability of a GPU (NVIDIA's number): kernels exist by it.
        fits: measurements of `dcpc calibrate`; None: seconds are the figures' roofline.
        communicator_bytes: memory that each process group of a rank takes beside torch's.
        host_bytes_per_s: bytes a second between the device and the host's memory, each way.
    """

    name: str
    flops_per_s: tuple[tuple[torch.dtype, float], ...]
    vector_flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: int
    launch_s: float
    node_ranks: int
    inside: Link
    across: Link
    overlaps: bool = True
    gpu: bool = False
    capability: Capability = (9, 0)
    fits: Fits | None = None
    communicator_bytes: int = 0
    host_bytes_per_s: float = 25 * GB

    @property
    def block_bytes(self) -> int:
        """Returns the unit that a tensor's bytes are rounded up to; 1 on a CPU."""
        return BLOCK_BYTES if self.gpu else 1

    @property
    def kernels_of(self) -> Capability | None:
        """The GPU's capability whose kernels ops run; None: they run the CPU's."""
        return self.capability if self.gpu else None

    @property
    def seconds_error(self) -> float | None:
        """Relative error of predicted seconds where they were calibrated; None: not known."""
        return None if self.fits is None else self.fits.error

    def matmul_flops_per_s(self, dtype: torch.dtype) -> float:
        """Returns the FLOP/s of a matmul in this dtype; float32's where the table has none."""
        table = dict(self.flops_per_s)
        return table.get(dtype, table[torch.float32])

    def link(self, ranks: int) -> Link:
        """Returns the link that a group of this many ranks is bound by."""
        fit = None if self.fits is None else self.fits.collective(_TYPICAL, ranks)
        if fit is not None:
            return Link(fit.alpha_s, 1 / fit.s_per_byte)
        return self.inside if ranks <= self.node_ranks else self.across

    def all_reduce_s(self, size_bytes: float, ranks: int, span: int = 0) -> float:
        """Returns the seconds of a sum over ranks as a ring.

        Args:
            size_bytes: bytes that each rank adds.
            ranks: number of ranks that add.
            span: ranks from the first to the last of them, others between; 0: they are neighbours.
        """
        if ranks == 1:
            return 0.0
        link = self.link(span or ranks)
        return link.alpha_s + 2.0 * (ranks - 1) / ranks * size_bytes / link.bytes_per_s


# The collective whose fit says what a link does: it sends each byte once, and computes nothing.
_TYPICAL = "dcpc::all_to_all"

# Hopper SXM. Source: NVIDIA H100 and H200 data sheets, dense (half of the figures "with sparsity"):
# bf16/fp16 989.5 TFLOP/s, fp32 67 (TF32 is off by default in torch), fp64 67 on tensor cores.
_HOPPER_FLOPS_PER_S = (
    (torch.bfloat16, 989.5 * TFLOP),
    (torch.float16, 989.5 * TFLOP),
    (torch.float32, 67.0 * TFLOP),
    (torch.float64, 67.0 * TFLOP),
)
# Ampere SXM. Source: NVIDIA A100 data sheet, dense: bf16/fp16 312, fp32 19.5, fp64 19.5 tensor.
_AMPERE_FLOPS_PER_S = (
    (torch.bfloat16, 312.0 * TFLOP),
    (torch.float16, 312.0 * TFLOP),
    (torch.float32, 19.5 * TFLOP),
    (torch.float64, 19.5 * TFLOP),
)
# Source: NVLink 4, 900 GB/s both ways together, so 450 each; NDR InfiniBand, 400 Gbit/s a GPU
# (DGX H100). alpha: assumed, 10 and 20 us, the order of NCCL's small-message latency.
_HOPPER_LINKS = (Link(10e-6, 450 * GB), Link(20e-6, 50 * GB))
# Source: NVLink 3, 600 GB/s both ways together; HDR InfiniBand, 200 Gbit/s a GPU (DGX A100).
_AMPERE_LINKS = (Link(10e-6, 300 * GB), Link(20e-6, 25 * GB))

# launch_s of GPUs: assumed, 4 us, the order of one eager kernel launch from Python-free code.
# Measured: 408 MB each, of one rank on an H100, the second to the eighth (docs/results/gpu.md).
# Reports of more differ: an all-to-all among 8 H100 over all channels took 3.3 GB
# (NVIDIA/nccl#1685). `dataclasses.replace(device, communicator_bytes=...)` sets what you find.
COMMUNICATOR_BYTES = 410_000_000
H200 = Device(
    name="h200",
    flops_per_s=_HOPPER_FLOPS_PER_S,
    vector_flops_per_s=67.0 * TFLOP,
    memory_bytes_per_s=4_800 * GB,  # H200 data sheet: 4.8 TB/s
    memory_bytes=141_000_000_000,  # H200 data sheet: 141 GB
    launch_s=4e-6,
    node_ranks=8,
    inside=_HOPPER_LINKS[0],
    across=_HOPPER_LINKS[1],
    gpu=True,
    communicator_bytes=COMMUNICATOR_BYTES,
    host_bytes_per_s=55 * GB,  # PCIe 5.0 x16: 64 GB/s each way, less what its packets take
)
H100 = replace(
    H200,
    name="h100",
    memory_bytes_per_s=3_350 * GB,  # H100 SXM data sheet: 3.35 TB/s
    memory_bytes=80_000_000_000,  # H100 SXM data sheet: 80 GB
)
A100_80GB = Device(
    name="a100-80gb",
    flops_per_s=_AMPERE_FLOPS_PER_S,
    vector_flops_per_s=19.5 * TFLOP,
    memory_bytes_per_s=2_039 * GB,  # A100 80GB SXM data sheet: 2,039 GB/s
    memory_bytes=80_000_000_000,
    launch_s=4e-6,
    node_ranks=8,
    inside=_AMPERE_LINKS[0],
    across=_AMPERE_LINKS[1],
    gpu=True,
    capability=(8, 0),
    communicator_bytes=COMMUNICATOR_BYTES,
    host_bytes_per_s=27 * GB,  # PCIe 4.0 x16: 32 GB/s each way, less what its packets take
)
A100_40GB = replace(
    A100_80GB,
    name="a100-40gb",
    memory_bytes_per_s=1_555 * GB,  # A100 40GB SXM data sheet: 1,555 GB/s
    memory_bytes=40_000_000_000,
)
# Measured with torch 2.13 on one core of an AMD EPYC with AVX-512, other processes running:
# matmul of 1024 x 1024, copy of 128 MB, gloo all-to-all of 16 MB between 2 processes.
CPU_CORE = Device(
    name="cpu",
    flops_per_s=(
        (torch.float64, 34e9),
        (torch.float32, 73e9),
        (torch.bfloat16, 157e9),
    ),
    vector_flops_per_s=2.3e9,
    memory_bytes_per_s=19e9,
    memory_bytes=4_000_000_000,  # assumed; `detect` reads the machine's
    # Of 5 small models' eager calls with backward on an Intel Xeon, 8 to 13 us (median 11) an op,
    # of which the call itself is some 3.
    launch_s=8e-6,
    node_ranks=1 << 20,
    inside=Link(800e-6, 0.9e9),
    across=Link(800e-6, 0.9e9),
    overlaps=False,  # gloo's threads and copies take the cores that compute
    host_bytes_per_s=9.5e9,  # a copy reads and writes
)
# Of a GPU's memory, what no plan may use: assumed, the order of a CUDA context (0.5 GB), cuBLAS'
# workspaces, and what the caching allocator cannot fit together.
_OUTSIDE_BYTES = 2_000_000_000
DEVICES = (H200, H100, A100_80GB, A100_40GB, CPU_CORE)


def find(name: str) -> Device:
    """Returns the device of this name.

    Raises:
        ProfileError: the table has no such device.
    """
    known = {device.name: device for device in DEVICES}
    check_choice("device: got ", name.lower(), known, ProfileError, " or a Device")
    return known[name.lower()]


def detect() -> Device:
    """Returns the device that this process would train on, with the memory it really has.

    Raises:
        ProfileError: there is a GPU that the table does not have.
    """
    if not torch.cuda.is_available():
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return replace(CPU_CORE, memory_bytes=pages)
    name = torch.cuda.get_device_name()
    memory_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    key = next((d.name for d in DEVICES if d.name.split("-")[0].upper() in name.upper()), None)
    if key is None:
        known = ", ".join(d.name for d in DEVICES)
        raise ProfileError(
            f"device: got a GPU {name!r}; expected one of {known}; pass device= the nearest of "
            "these, or a Device with its figures"
        )
    if key.startswith("a100"):
        key = "a100-80gb" if memory_bytes > 60 * GB else "a100-40gb"
    return replace(find(key), memory_bytes=memory_bytes - _OUTSIDE_BYTES)


def calibrated(device: Device, fits: Fits) -> Device:
    """Returns the device with measured figures in place of its data sheet's."""
    table = {**dict(device.flops_per_s), **dict(fits.flops_per_s)}
    return replace(
        device,
        flops_per_s=tuple(table.items()),
        memory_bytes_per_s=fits.memory_bytes_per_s or device.memory_bytes_per_s,
        launch_s=fits.launch_s or device.launch_s,
        fits=fits,
    )
