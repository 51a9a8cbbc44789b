"""Each family with each form of rotary embedding that a config may have, against transformers."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import torch

from ramify.cli.flags import add_config_flags, given_fields
from ramify.errors import InvalidRequest, UnsupportedField
from ramify.runtime.config import EngineConfig
from ramify.runtime.inspect.machine import Machine
from ramify.runtime.inspect.report import inspected
from ramify.runtime.model.checkpoint import ModelFiles
from ramify.runtime.model.loading.load import load_model, read_config, read_shape
from ramify.runtime.model.shape.config import Family, ModelConfig
from ramify.runtime.model.shape.context import context_notes, with_context
from ramify.runtime.model.shape.hf_config import config_from_folder
from ramify.runtime.model.transformers.trace import shape_of
from ramify.runtime.processes.worker_process import Orders
from tests.runtime.oracle import greedy

from .architectures import save_tiny, tiny_config, tiny_model
from .checkpoints import change
from .dense import logits
from .equality import PROMPTS, assert_engine_equal, assert_logits_equal, loaded, native
from .gguf_files import write_gguf
from .own_families import HYBRIDS, reference_of

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = 30
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
FORMS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": YARN,
    "yarn mscale": {**YARN, "mscale": 1.3, "mscale_all_dim": 0.6, "beta_fast": 16.0},
    "yarn mscale alone": {**YARN, "mscale": 0.7, "attention_factor": 1.1},
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": 64},
    "longrope, long": {"rope_type": "longrope", "original_max_position_embeddings": 16},
}


def rope_parameters(base: dict[str, Any], form: str, head_dim: int) -> dict[str, Any]:
    """A family's own parameters `base`, changed to a form of `FORMS`; of families with windows, in layers
    without."""
    if "full_attention" in base:
        return base | {"full_attention": rope_parameters(base["full_attention"], form, head_dim)}
    kept = {name: base[name] for name in ("rope_theta", "partial_rotary_factor") if name in base}
    found = kept | FORMS[form]
    if found["rope_type"] == "longrope":
        pairs = int(head_dim * base.get("partial_rotary_factor", 1.0)) // 2
        found["short_factor"] = [1.0 + 0.1 * index for index in range(pairs)]
        found["long_factor"] = [2.0 + 0.5 * index for index in range(pairs)]
    return found


def forms_of(family: Family) -> list[str]:
    """The forms that transformers allows: in a config of Phi-3 longrope alone."""
    return [form for form in FORMS if family != "phi3" or form.startswith("longrope")]


OPTIONS: dict[str, Any] = {"gemma3": {"layer_types": ["sliding_attention", "full_attention"]}}
"""Options by family: Gemma 3 has a layer that sees all tokens in these tests."""


@pytest.mark.slow
@pytest.mark.parametrize("family", get_args(Family))
def test_logits_equal_transformers_in_every_form(family: Family, tmp_path: Path) -> None:
    ids = torch.tensor(PROMPTS[4][:TOKENS])
    options = OPTIONS.get(family, {})
    base = reference_of(family, **options).config
    head_dim = getattr(base, "head_dim", None) or base.hidden_size // base.num_attention_heads
    tables: list[torch.Tensor] = []
    for form in forms_of(family):
        folder = tmp_path / form
        parameters = rope_parameters(dict(base.rope_parameters), form, head_dim)
        if family == "phi3":
            options = {"original_max_position_embeddings": parameters["original_max_position_embeddings"]}
        reference = reference_of(family, folder, rope_parameters=parameters, **options)
        long = {"context_length": 128} if form == "longrope, long" else {}
        model = native(folder, **long)
        if family in HYBRIDS:
            assert_logits_equal(reference, model)
        else:
            with torch.no_grad():
                wanted = reference(input_ids=ids[None], use_cache=False).logits[0]
            torch.testing.assert_close(logits(model, ids), wanted, atol=2e-4, rtol=0)
        tables.append(torch.stack([table[:TOKENS] for table in model.rotations]))
    different = [(one - other).abs().max() for one, other in itertools.combinations(tables, 2)]
    assert min(different) > 1e-3, "the form matters"


def test_a_long_rope_is_short_unless_a_longer_context_is_asked_for(tmp_path: Path) -> None:
    """A model like Phi-4-mini: the engine's tokens are those of transformers for requests within the original
    context, which is the engine's."""
    parameters = rope_parameters({"rope_theta": 1e4, "partial_rotary_factor": 0.75}, "longrope", 16)
    original = {"original_max_position_embeddings": 64}
    reference = reference_of("phi3", tmp_path, rope_parameters=parameters, **original)
    assert read_config(tmp_path).context_length == 512
    model = native(tmp_path)
    assert model.config.context_length == 64
    assert_engine_equal(reference, model)
    short, long = (config_from_folder(tmp_path), 65)
    assert [len(context_notes(short, length)) for length in (None, 64, 65, 513)] == [1, 0, 1, 2]
    (note,) = context_notes(short, None)
    assert "64 tokens of the model's 512" in note
    assert "--context-length N above 64" in note
    ids = torch.tensor(PROMPTS[4])
    with torch.no_grad():
        wanted = reference(input_ids=ids[None], use_cache=False).logits[0]
    found = logits(native(tmp_path, context_length=long), ids)
    assert (found - wanted).abs().max() > 0.1, "the warning says so"


@pytest.mark.parametrize("form", ["dynamic", "longrope"])
def test_forms_by_length_run_by_the_code_of_transformers(form: str, tmp_path: Path) -> None:
    parameters = rope_parameters({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, form, 16)
    config = tiny_config("stablelm", rope_parameters=parameters)
    reference = save_tiny(config, tmp_path)
    model = loaded(tmp_path)
    own = 512 if form == "dynamic" else 64
    assert model.config.context_length == own
    assert_engine_equal(reference, model)
    with pytest.raises(InvalidRequest, match=rf"1 to {own} tokens: .*'{form}' rotates all tokens .*length"):
        with_context(shape_of(config), own + 1)


def test_longer_than_the_model_was_made_for(tmp_path: Path) -> None:
    reference_of("llama", tmp_path)
    shape = config_from_folder(tmp_path)
    assert with_context(shape, 2000).context_length == 2000
    assert "made for 512 tokens" in context_notes(shape, 2000)[0]
    assert not context_notes(shape, 512)
    files = ModelFiles("tiny", tmp_path, tmp_path)
    found = inspected(files, MACHINE, EngineConfig(context_length=2000), chat=False)
    assert (found.context_length, found.notes) == (2000, context_notes(shape, 2000))
    with pytest.raises(InvalidRequest, match="exact in float32"):
        with_context(shape, 1 << 25)
    learned = shape_of(tiny_config("gpt2"))
    with pytest.raises(InvalidRequest, match=r"1 to 512 tokens: it has learned no further"):
        with_context(learned, 513)
    by_library = read_shape(tmp_path, "transformers")
    assert with_context(by_library, 513).context_length == 513


MACHINE = Machine("cpu", "the CPU", 1 << 34, "float32")


def test_an_extension_that_is_asked_for(tmp_path: Path) -> None:
    """The extension of Qwen3's model card: yarn by a factor of 4. All ways to read a model take it."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 192}
    reference = reference_of("qwen3", tmp_path / "plain")
    write_gguf(reference, tmp_path / "tiny.gguf", "qwen3")
    extended = tiny_config("qwen3", rope_parameters={"rope_theta": 1e4, **scaling})
    wanted_ids = greedy(tiny_model(extended), PROMPTS[0], 8).ids
    assert wanted_ids != greedy(reference, PROMPTS[0], 8).ids
    ids = torch.tensor(PROMPTS[4])
    with torch.no_grad():
        wanted = tiny_model(extended)(input_ids=ids[None], use_cache=False).logits[0]
    for weights, implementation in (
        (tmp_path / "plain", "native"),
        (tmp_path / "tiny.gguf", "native"),
        (tmp_path / "plain", "transformers"),
    ):
        shape = read_shape(weights, implementation, scaling)  # type: ignore[arg-type]
        assert shape.context_length == 768
        assert not context_notes(shape, None)
        files = ModelFiles("tiny", weights, weights)
        model = load_model(files, shape=shape, dtype=torch.float32)
        if isinstance(shape, ModelConfig):
            torch.testing.assert_close(logits(model, ids), wanted, atol=2e-4, rtol=0)  # type: ignore[arg-type]
        else:
            assert_logits_equal(tiny_model(extended), model)
    files = ModelFiles("tiny", tmp_path / "plain", tmp_path)
    found = inspected(files, MACHINE, EngineConfig(rope_scaling=scaling), chat=False)
    assert found.context_length == 768


def test_an_extension_changes_layers_that_see_all_tokens(tmp_path: Path) -> None:
    reference_of("gemma3", tmp_path, **OPTIONS["gemma3"])
    before = config_from_folder(tmp_path)
    after = config_from_folder(tmp_path, {"rope_type": "linear", "factor": 8.0})
    assert after.windows == (8, 0)
    assert after.ropes[0] == before.ropes[0]
    assert (after.ropes[1].kind, after.ropes[1].factor, after.ropes[1].theta) == ("linear", 8.0, 1e6)
    assert after.context_length == 8 * before.context_length


@pytest.mark.parametrize(
    ("scaling", "said"),
    [
        ({"rope_type": "yarn", "factor": "4"}, r"rope_scaling.factor is '4'"),
        ({"rope_type": "yarn", "factor": -1.0}, r"rope_scaling.factor is -1"),
        ({"rope_type": "linear"}, "linear without a factor"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "short_factor needs"),
        (
            {"rope_type": "longrope", "short_factor": 3, "long_factor": [1.0]},
            "short_factor is 3; it must be a list",
        ),
    ],
)
@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_what_an_extension_cannot_be(
    scaling: dict[str, Any], said: str, implementation: Any, tmp_path: Path
) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    with pytest.raises(InvalidRequest, match=rf"^rope_scaling \(--rope-scaling\) does not go .*: .*{said}"):
        read_shape(tmp_path, implementation, scaling)


@pytest.mark.parametrize(
    ("scaling", "said"),
    [
        ({}, "it has no rope_type; it must be one of default, linear, yarn"),
        ({"rope_type": "yran", "factor": 2.0}, "its rope_type is 'yran'"),
        ({"rope_type": "dynamic", "factor": 2.0}, "dynamic changes nothing"),
        ({"rope_type": "yarn", "factr": 2.0}, "no field 'factr'. Did you mean factor?"),
        ({"rope_type": "yarn", "factor": "x"}, "factor is 'x'; it must be a number above 0"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": 1}, "truncate is 1; it must be true or false"),
        ({"rope_type": "linear"}, "linear has no factor"),
        ({"rope_type": "longrope", "factor": 2.0}, "longrope has no short_factor and no long_factor"),
        ({"rope_type": "longrope", "short_factor": 1}, "short_factor is 1; it must be a list"),
    ],
)
def test_an_extension_is_checked_before_anything_starts(scaling: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EngineConfig(rope_scaling=scaling)


def test_an_extension_reaches_the_processes_from_the_command_line() -> None:
    text = (
        '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "truncate": false}'
    )
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_config_flags(parser, EngineConfig)
    options = parser.parse_args(["--rope-scaling", text])
    config = EngineConfig(**given_fields(options, EngineConfig))
    assert config.rope_scaling == json.loads(text)
    orders = Orders(sockets="", config=config, tokenizer="", weights="", model_name="")
    assert msgspec.json.decode(msgspec.json.encode(orders), type=Orders) == orders
    for wrong, said in (("[1]", "no JSON object"), ("{1", "is not JSON")):
        with pytest.raises(argparse.ArgumentError, match=said):
            parser.parse_args(["--rope-scaling", wrong])


def test_models_without_a_rotary_embedding_cannot_be_extended(tmp_path: Path) -> None:
    tiny_config("gpt2").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedField, match="no rotary embedding that rope_scaling could extend"):
        read_shape(tmp_path, "auto", FORMS["yarn"])


def test_what_keeps_a_family_from_our_code_is_told(tmp_path: Path) -> None:
    config = tiny_config("llama")
    config.save_pretrained(tmp_path)
    change(tmp_path, hidden_act="gelu")
    shape = read_shape(tmp_path)
    assert not isinstance(shape, ModelConfig)
    assert "hidden_act" in shape.not_native
