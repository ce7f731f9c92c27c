"""Global batches of sequence lengths: read from a folder, or generated when there is none."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SHARED = Path(__file__).parents[2] / "shared" / "data" / "lengths"
MULTIPLE = 128

# quantiles of Wikipedia article lengths (shared/data/README.md); the ends are ours
WIKIPEDIA = ((0.0, 64), (0.5, 347), (0.9, 2112), (0.99, 10921), (0.999, 37367),
             (0.9999, 102060), (1.0, 393216))  # fmt: skip
# upper ends and cumulative shares of 13.45 million documents (published by MagiAttention)
HEAVY_TAIL = ((0.0, 1), (0.0022, 10), (0.0313, 50), (0.0833, 100), (0.1856, 200), (0.4675, 500),
              (0.7138, 1024), (0.8703, 2048), (0.9437, 4096), (0.9742, 8192), (0.9871, 16384),
              (0.9956, 32768), (0.9970, 65536), (0.9986, 131072), (1.0, 196608))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Batch:
    """One global batch: a name `family_number`, tokens of each sequence, cost overrides."""

    name: str
    lens: tuple[int, ...]
    cost: dict[str, float] = field(default_factory=dict)

    @property
    def family(self) -> str:
        """The name without its number."""
        return self.name.rpartition("_")[0] or self.name

    @property
    def number(self) -> str:
        return self.name.rpartition("_")[2]


def read(folder: Path) -> list[Batch]:
    """All batches of a folder: `*.json` with {"lens": [...], "cost": {...}}."""
    out = []
    for file in sorted(folder.glob("*.json")):
        entry = json.loads(file.read_text())
        out.append(Batch(file.stem, tuple(entry["lens"]), entry.get("cost", {})))
    if not out:
        raise SystemExit(f"{folder}: got 0 files *.json, expected batches; name another folder")
    return out


def generate(seed: int = 0, count: int = 12) -> list[Batch]:
    """Batches of the same families from published quantiles, in place of real ones."""
    rng = np.random.default_rng(seed)
    out = []
    for cap, cost in ((384, {}), (192, {"param_b": 7.1174468994140625})):
        for i in range(count):
            lens = sample(WIKIPEDIA, 512, rng, cap * 1024)
            out.append(Batch(f"wikipedia_{cap}k_{i + 1:02d}", lens, dict(cost)))
    for i in range(3):
        lens = sample(HEAVY_TAIL, 512, rng, 192 * 1024)
        out.append(Batch(f"heavytail_192k_{i + 1}", lens, {"param_b": 7.1174468994140625}))
    return out


def sample(
    quantiles: tuple[tuple[float, int], ...], n: int, rng: np.random.Generator, cap: int
) -> tuple[int, ...]:
    """`n` lengths by log-linear interpolation of quantiles, padded, none over `cap`."""
    share, length = np.array(quantiles).T
    drawn: NDArray[np.float64] = np.exp(np.interp(rng.random(n), share, np.log(length)))
    padded = np.ceil(drawn / MULTIPLE).astype(int) * MULTIPLE
    return tuple(int(x) for x in padded if x <= cap)
