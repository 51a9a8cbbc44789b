"""Adapters that are read, and refusals by name."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ramify.errors import InvalidRequest, Overloaded, RamifyError, UnsupportedField
from ramify.runtime.lora_names import same_model
from ramify.runtime.model.checkpoint import ModelFiles
from ramify.runtime.model.loading.load import load_model
from ramify.runtime.model.lora.adapters import Adapters
from ramify.runtime.model.lora.peft import WEIGHTS, read_adapter
from tests.model.adapters import write_adapter
from tests.model.checkpoints import change_tensors
from tests.runtime.tiny import write_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora-base") / "base"
    write_model(folder)
    return folder


@pytest.fixture(scope="module")
def adapters(base: Path) -> Adapters:
    files = ModelFiles(name="tiny", weights=base, tokenizer=base)
    return Adapters(load_model(files, dtype=torch.float32))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora is set: DoRA"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is set"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"a_field_of_2030": 1}, "a_field_of_2030 is set"),
        ({"target_modules": ["q_proj"]}, "its file has tensors of model.layers.0.self_attn.k_proj"),
        ({"layers_to_transform": [1]}, "its file has tensors of model.layers.0"),
        ({"target_modules": r".*\.(q|k)_proj"}, "its file has tensors of model.layers.0.self_attn.v_proj"),
        ({"r": 5}, "ranks 4 and 4, and its config says 5"),
        ({"r": 0}, "r: Expected `int` >= 1"),
        ({"use_rslora": "no"}, "use_rslora: Expected `bool | null`, got `str`"),
        ({"rank_pattern": {"x": 0}}, "rank_pattern[...]: Expected `int` >= 1"),
        ({"alpha_pattern": {"q_proj": "abc"}}, "alpha_pattern[...]: Expected `float`"),
        ({"lora_alpha": math.nan}, "adapter_config.json is no JSON object"),
        ({"target_modules": "("}, "target_modules: '(' is no regular expression"),
        ({"rank_pattern": {"(?i)q": 4}}, "rank_pattern: '(?i)q' is no regular expression"),
        ({"layers_pattern": ["("]}, "layers_pattern: '(' is no regular expression"),
        ({"lora_alpha": 1e38}, "values that are not finite in torch.float32, or a scale (2.5e+37)"),
    ],
)
def test_what_is_refused(
    base: Path, adapters: Adapters, tmp_path: Path, config: dict[str, object], message: str
) -> None:
    folder = write_adapter(tmp_path / "a", base, seed=0, **config)
    with pytest.raises(RamifyError) as caught:
        adapters.load("a", str(folder))
    assert isinstance(caught.value, InvalidRequest | UnsupportedField)
    assert message in str(caught.value)
    assert caught.value.field == "path"


@pytest.mark.parametrize("targets", ["all-linear", r".*(_proj)", None])
def test_other_spellings_of_all_targets(
    base: Path, adapters: Adapters, tmp_path: Path, targets: str | None
) -> None:
    folder = write_adapter(tmp_path / "a", base, seed=0, target_modules=targets)
    adapters.load("a", str(folder))
    adapters.unload("a")


@pytest.mark.parametrize(
    ("module", "shape"), [("lm_head", (320, 64)), ("model.layers.0.mlp.experts.3.up_proj", (128, 64))]
)
def test_modules_that_adapters_cannot_change(
    base: Path, adapters: Adapters, tmp_path: Path, module: str, shape: tuple[int, int]
) -> None:
    folder = write_adapter(tmp_path / "a", base, seed=0)
    stem, (outputs, inputs) = f"base_model.model.{module}", shape
    more = {f"{stem}.lora_A.weight": torch.zeros(4, inputs), f"{stem}.lora_B.weight": torch.zeros(outputs, 4)}
    change_tensors(folder, WEIGHTS, **more)
    with pytest.raises(UnsupportedField, match=f"it changes {module}"):
        adapters.load("a", str(folder))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite(base: Path, adapters: Adapters, tmp_path: Path, value: float) -> None:
    folder = write_adapter(tmp_path / "a", base, seed=0)
    stem, tensors = "base_model.model.model.layers.1.mlp.up_proj", load_file(folder / WEIGHTS)
    tensors[f"{stem}.lora_A.weight"][0, 0] = value
    tensors[f"{stem}.lora_B.weight"].zero_()
    change_tensors(folder, WEIGHTS, **tensors)
    with pytest.raises(InvalidRequest, match=r"layers\.1\.mlp\.up_proj.* has values that are not finite"):
        adapters.load("a", str(folder))


def test_an_adapter_that_the_device_has_no_memory_for(base: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", base, seed=0, targets=("o_proj",), layers=[0])
    size = sum(4 * tensor.numel() for tensor in load_file(folder / WEIGHTS).values())
    model = load_model(ModelFiles("tiny", base, base), dtype=torch.float32)
    with pytest.raises(Overloaded, match="of the device's memory, of which"):
        Adapters(model, free=lambda _: size - 1).load("a", str(folder))
    Adapters(model, free=lambda _: size).load("a", str(folder))


def test_names_of_base_models() -> None:
    adapter = "HuggingFaceTB/SmolLM2-135M-Instruct"
    for served in (
        "SmolLM2-135M-Instruct",
        "models/smollm2-135m-instruct/",
        "x/SmolLM2-135M-Instruct-GGUF:Q4_0",
    ):
        assert same_model(adapter, served)
    assert not same_model(adapter, "SmolLM2-135M")
    assert not same_model("SmolLM2-135M", adapter)
    assert same_model("", adapter)


def test_an_adapter_of_another_model(base: Path, adapters: Adapters, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", base, seed=0, targets=("q_proj",))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    change_tensors(folder, WEIGHTS, **{name: torch.zeros(8, 4)})
    with pytest.raises(InvalidRequest, match="Load the adapter of this model"):
        adapters.load("a", str(folder))


def test_the_revision_is_that_of_the_files(base: Path, tmp_path: Path) -> None:
    folders = [write_adapter(tmp_path / str(i), base, seed=seed) for i, seed in enumerate((0, 0, 1))]
    first, same, other = (read_adapter(folder).revision for folder in folders)
    assert first == same != other
    config = folders[0] / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 3}))
    assert read_adapter(folders[0]).revision not in (first, other)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_adapter(tmp_path)
