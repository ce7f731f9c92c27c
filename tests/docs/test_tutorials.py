"""The quick start and the tutorials run, and print what they show."""

from pathlib import Path

import pytest

from tests.cases.documents import agrees, blocks, outputs, rewritten

DOCS = Path(__file__).parents[2] / "docs"
RUN = [DOCS / "quickstart.md", *sorted((DOCS / "tutorials").glob("*.md"))]


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("file", RUN, ids=lambda f: f.stem)
def test_blocks_print_what_is_shown(file, tmp_path):
    compared = 0
    for block, printed in outputs(file.read_text(), tmp_path):
        if block.shown is not None:
            assert agrees(block.shown.code, printed), f"{block.code}\nprinted\n{printed}"
            compared += 1
    assert compared >= 4


DOCUMENT = """
```python title="one.py"
ONE = 1
```

```python
from one import ONE
print(ONE, 2.51)
```

```text
1 2.5
```

Words between: the next is no output.

```text
3
```

```bash
echo two lines; echo end
```

```text
...
end
```
"""


def test_a_document_is_run_and_compared(tmp_path):
    ran = [(b.shown.code, printed) for b, printed in outputs(DOCUMENT, tmp_path) if b.shown]
    assert [shown for shown, _ in ran] == ["1 2.5\n", "...\nend\n"]
    assert all(agrees(shown, printed) for shown, printed in ran)
    assert len(blocks(DOCUMENT)) == 3


def test_what_differs_is_seen_and_rewritten(tmp_path):
    wrong = DOCUMENT.replace("1 2.5", "1 2.6")
    assert rewritten(wrong, tmp_path) == DOCUMENT.replace("1 2.5", "1 2.51")
    assert not agrees("a ... c", "a b")
    assert not agrees("2 samples", "3 samples")
    assert agrees("a\n  b", "a b")
