"""VideoSys' keys: what they ask of compile and of the loader, and wrong ones by their line."""

import warnings

import pytest

import dcpc

PAC = """
dynamic_sp: true
dynamic_recompute: true
auto_grad_accumulation: true
min_grad_accumulation_steps: 2
max_grad_accumulation_steps: 16
calculate_imbalance: true
alloc_memory_fraction: 0.9
"""


def settings(tmp_path, text) -> dcpc.Settings:
    file = tmp_path / "dcp.yaml"
    file.write_text(text)
    return dcpc.Settings.from_yaml(file)


def test_inter_with_pac(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = settings(tmp_path, PAC)
    assert found.compile_options() == {"recompute": "pyramid", "memory": 0.9}
    assert found.loader_options() == {
        "mode": "inter",
        "calculate_imbalance": True,
        "min_grad_accumulation_steps": 2,
        "max_grad_accumulation_steps": 16,
    }


def test_intra_and_dcpcs_own_mode(tmp_path):
    intra = settings(tmp_path, "dynamic_sp: true")
    assert intra.compile_options() == {"recompute": "all"}
    assert intra.loader_options() == {"mode": "intra", "calculate_imbalance": False}
    assert settings(tmp_path, "dynamic_sp: true\nmode: auto").loader_options()["mode"] == "auto"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dynamic_sp: true\nprofile_path: /p", "profile_path='/p' is not read: dcpc derives"),
        ("dynamic_recompute: true", "dynamic_sp is false: pass the one degree"),
        ("dynamic_sp: true\nmax_grad_accumulation_steps: 3", "max_grad.* have no effect"),
    ],
)
def test_what_has_no_effect_is_a_warning(tmp_path, text, message):
    with pytest.warns(UserWarning, match=message):
        settings(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dynamic_sp: true\ndynamic_spp: 1", "dcp.yaml:2: got the key 'dynamic_spp'.*did you mean"),
        ("colour: red", "dcp.yaml:1: got the key 'colour'; expected one of .*remove it"),
        ("dynamic_sp: 3", r"dcp.yaml:1: dynamic_sp: got 3; expected.*boolean"),
        ("\nalloc_memory_fraction: 1.5", "dcp.yaml:2: alloc_memory_fraction: got 1.5"),
        ("min_grad_accumulation_steps: 0", "dcp.yaml:1: min_grad.*got 0"),
        ("- 3", "dcp.yaml:1: got .3.; expected `name: value` pairs"),
    ],
)
def test_wrong_key_or_value_is_named_with_its_line(tmp_path, text, message):
    with pytest.raises(dcpc.DataError, match=message):
        settings(tmp_path, text)
