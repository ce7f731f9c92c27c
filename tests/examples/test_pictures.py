"""The pictures show what the plans of today say, and the texts under them say the same."""

from pathlib import Path

import pytest

from examples import pictures
from examples.sketches import draw_sketches, write

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def plan():
    return pictures.planned()


@pytest.mark.slow
def test_texts_have_the_seconds_of_the_picture(plan):
    found = pictures.race(plan)
    assert len({sample for mb in found.dcpc.micro_batches for sample in mb.sample_ids}) == 85
    said = (
        f"with one degree for all samples the step takes {found.one_degree.makespan_s:.2f} s, "
        f"with a degree for each length {found.dcpc.makespan_s:.2f} s"
    )
    assert said in (ROOT / "README.md").read_text()
    assert said in (ROOT / "docs/concepts.md").read_text()


@pytest.mark.slow
def test_the_lowest_point_that_fits_is_on_the_curve_that_the_text_names(plan):
    bucket = plan.find({"seq": pictures.SIZES[2]})
    left_bytes = plan.memory_bytes - plan.request.resident_bytes
    lowest = {
        sp: min(sp * s for peak, s in pictures.curve(plan, bucket, sp) if peak <= left_bytes)
        for sp in (1, 2, 4)
    }
    assert min(lowest, key=lowest.get) == 2 == plan.plans[bucket].sp
    assert plan.plans[bucket].menu_step > 0


def test_a_sketch_is_the_same_file_each_time(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        draw_sketches(tmp_path / name)
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()
    assert not list(tmp_path.glob("*.svg"))
    write(pictures.Figure(), tmp_path / "empty.svg")
    assert "<svg" in (tmp_path / "empty.svg").read_text()
