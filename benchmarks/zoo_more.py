"""More of the zoo: other architectures of the same libraries, to see what each family needs.

`python -m benchmarks.zoo --more` runs them; nothing is claimed of them but what it prints.
"""

from benchmarks.zoo_diffusion import DIFFUSION
from benchmarks.zoo_hybrids import HYBRIDS
from benchmarks.zoo_media import SPEECH, VISION
from benchmarks.zoo_models import ZooModel
from benchmarks.zoo_text import TEXT_MODELS

MORE: dict[str, ZooModel] = {**TEXT_MODELS, **SPEECH, **VISION, **DIFFUSION, **HYBRIDS}
