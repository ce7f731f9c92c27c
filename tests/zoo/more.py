"""More of the zoo: other architectures of the same libraries, to see what each family needs.

`python -m benchmarks.zoo --more` runs them; nothing is claimed of them but what it prints.
"""

from tests.zoo.diffusion import DIFFUSION
from tests.zoo.experts import EXPERTS
from tests.zoo.hybrids import HYBRIDS
from tests.zoo.hybrids import LEFT_OUT as WITHOUT_TIMM
from tests.zoo.lucidrains import LEFT_OUT as WITHOUT_OTHERS
from tests.zoo.lucidrains import LUCIDRAINS
from tests.zoo.media import SPEECH, VISION
from tests.zoo.mixed import MIXED
from tests.zoo.models import ZooModel
from tests.zoo.recurrent import RECURRENT
from tests.zoo.text import TEXT_MODELS

TEXT = {**TEXT_MODELS, **EXPERTS, **RECURRENT}
MORE: dict[str, ZooModel] = {
    **TEXT,
    **SPEECH,
    **VISION,
    **DIFFUSION,
    **HYBRIDS,
    **MIXED,
    **LUCIDRAINS,
}
LEFT_OUT = {**WITHOUT_TIMM, **WITHOUT_OTHERS}  # name -> package that is not installed
