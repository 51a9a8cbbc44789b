"""GGUF files give the model they were written from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from transformers import PreTrainedModel

from ramify.errors import InvalidRequest, NotFound, UnsupportedField
from ramify.runtime.model.gguf import weights
from ramify.runtime.model.gguf.blocks import CHUNK
from ramify.runtime.model.gguf.config import ARCHITECTURES as READ
from ramify.runtime.model.gguf.header import read_header
from ramify.runtime.model.loading.load import read_config
from ramify.runtime.model.shape.config import Family

from .checkpoints import Case, build, expected, prompt
from .dense import logits
from .equality import assert_logits_equal, native
from .gguf_files import write_gguf
from .own_families import FAMILIES, write_gguf_of

LLAMA = Case("llama", "llama")


@pytest.mark.parametrize("family", [name for name, own in FAMILIES.items() if own.gguf.architecture in READ])
def test_logits_equal_transformers(family: Family, tmp_path: Path) -> None:
    reference = write_gguf_of(family, tmp_path / "tiny.gguf")
    reference.save_pretrained(tmp_path / "folder")
    model = native(tmp_path / "tiny.gguf")
    assert model.config.experts == read_config(tmp_path / "folder").experts
    assert (model.config.eos_token_ids, model.config.bos_token_id) == ((2, 3), 1)
    assert_logits_equal(reference, model)


GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 5}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
NEAR = {"rope_type": "default", "rope_theta": 100.0}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, int | float | str]]] = {
    "biases": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}, {}),
    "linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 3.0},
    ),
    "yarn": (
        "qwen3",
        {"head_dim": 16, "rope_parameters": {**YARN, "rope_theta": 1e4}},
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32,
        },
    ),
    "caps": (
        "gemma2",
        {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 9.0},
        {"attention.sliding_window": 5, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 9.0},
    ),
    "two rotary embeddings": (
        "gemma3_text",
        {
            **GEMMA,
            "num_hidden_layers": 7,
            "initializer_range": 0.2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e3},
                "sliding_attention": NEAR,
            },
        },
        {
            "attention.sliding_window": 5,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
            "rope.freq_base_swa": 100.0,
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_metadata_that_changes_the_model(name: str, tmp_path: Path) -> None:
    model_type, options, metadata = CASES[name]
    reference = build(Case(name, model_type, options))
    write_gguf(reference, tmp_path / "tiny.gguf", model_type.removesuffix("_text"), metadata=metadata)
    ids = prompt()
    model = native(tmp_path / "tiny.gguf")
    torch.testing.assert_close(logits(model, ids), expected(reference, ids), atol=1e-4, rtol=0)


def test_rope_factors_are_read_from_their_tensor(tmp_path: Path) -> None:
    """Llama 3.1 files hold its stretched frequencies as divisors; equal ones are linear scaling."""
    scaled = build(
        Case("", "llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}})
    )
    write_gguf(scaled, tmp_path / "tiny.gguf", "llama", rope_factors=np.full(4, 3.0))
    ids = prompt()
    model = native(tmp_path / "tiny.gguf")
    assert model.config.rope.factors == (3.0,) * 4
    torch.testing.assert_close(logits(model, ids), expected(scaled, ids), atol=1e-4, rtol=0)


@pytest.fixture
def wide() -> PreTrainedModel:
    """Rows long enough for every block size."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 1}
    return build(Case("", "llama", {**shape, "vocab_size": 2 * CHUNK // 256 + 9}))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_every_block_type(kind: str, wide: PreTrainedModel, tmp_path: Path) -> None:
    """The values are those of `gguf` for the whole tensor, also where it has several chunks."""
    type_ = GGMLQuantizationType[kind]
    write_gguf(wide, tmp_path / "tiny.gguf", "llama", matrices=type_)
    found = dict(weights.tensors_in_file(read_header(tmp_path / "tiny.gguf"), torch.float32))
    for name in ("model.layers.0.mlp.down_proj.weight", "model.embed_tokens.weight"):
        original = wide.get_parameter(name).detach().numpy()
        wanted = torch.from_numpy(dequantize(quantize(original, type_), type_))
        torch.testing.assert_close(found[name], wanted, atol=0, rtol=0)


def test_weights_come_in_the_wanted_dtype(wide: PreTrainedModel, tmp_path: Path) -> None:
    write_gguf(wide, tmp_path / "tiny.gguf", "llama", matrices=GGMLQuantizationType.Q8_0)
    header = read_header(tmp_path / "tiny.gguf")
    full = dict(weights.tensors_in_file(header, torch.float32))
    for name, tensor in weights.tensors_in_file(header, torch.bfloat16):
        torch.testing.assert_close(tensor, full[name].bfloat16(), atol=0, rtol=0)


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"expert_count": 8}, "llama.expert_count"),
        ({"rope.dimension_count": 4}, "llama.rope.dimension_count"),
        ({"rope.scaling.type": "longrope"}, "llama.rope.scaling.type"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    metadata: dict[str, int | float | str], named: str, tmp_path: Path
) -> None:
    write_gguf(build(LLAMA), tmp_path / "tiny.gguf", "llama", metadata=metadata)
    with pytest.raises(UnsupportedField, match=named):
        read_config(tmp_path / "tiny.gguf")


@pytest.mark.parametrize(("type_", "name"), [(GGMLQuantizationType.Q8_K, "Q8_K"), (4, "4")])
def test_a_type_that_cannot_be_dequantised_is_refused_by_name_before_weights_load(
    type_: int, name: str, tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(build(LLAMA), path, "llama")
    at = path.read_bytes().index(b"blk.0.ffn_down.weight") + len("blk.0.ffn_down.weight") + 4 + 2 * 8
    with path.open("r+b") as file:
        file.seek(at)
        file.write(int(type_).to_bytes(4, "little"))
    with pytest.raises(UnsupportedField, match=rf"ffn_down.weight is stored as GGML type {name},"):
        read_config(path)


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    write_gguf(build(LLAMA), tmp_path / "tiny.gguf", "baichuan")
    with pytest.raises(UnsupportedField, match="baichuan"):
        read_config(tmp_path / "tiny.gguf")


def test_a_model_in_several_files_is_read_from_any_of_them(tmp_path: Path) -> None:
    reference = build(LLAMA)
    write_gguf(reference, tmp_path / "tiny.gguf", "llama", per_file=12)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"tiny-0000{index}-of-00003.gguf" for index in (1, 2, 3)]
    ids = prompt()
    for name in names[:2]:
        torch.testing.assert_close(
            logits(native(tmp_path / name), ids), expected(reference, ids), atol=1e-4, rtol=0
        )
    (tmp_path / names[0]).rename(tmp_path / "alone.gguf")
    with pytest.raises(InvalidRequest, match="one of 3 files of a model, and is not named so"):
        read_header(tmp_path / "alone.gguf")
    with pytest.raises(NotFound, match=r"-00001-of-00003\.gguf is missing beside it"):
        read_header(tmp_path / names[1])


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write_gguf(build(LLAMA), tmp_path / "tiny.gguf", "llama", drop="blk.1.attn_v.weight")
    with pytest.raises(InvalidRequest, match=r"lacks 1 of .* model\.layers\.1\.self_attn\.v_proj\.weight"):
        native(tmp_path / "tiny.gguf")


def test_a_file_cut_short_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(build(LLAMA), path, "llama")
    whole = path.read_bytes()
    for size in (0, 3, 20, 1000, 60_000, len(whole) - 5000, len(whole) - 5):
        path.write_bytes(whole[:size])
        with pytest.raises(InvalidRequest, match=r"tiny\.gguf|ends inside"):
            native(path)
    path.write_bytes(b"PK\x03\x04" + whole[4:])
    with pytest.raises(InvalidRequest, match="not GGUF"):
        native(path)


def test_a_relative_path_is_read_from_where_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = build(LLAMA)
    write_gguf(reference, tmp_path / "tiny.gguf", "llama")
    monkeypatch.chdir(tmp_path)
    torch.testing.assert_close(
        logits(native(Path("tiny.gguf")), prompt()), expected(reference, prompt()), atol=1e-4, rtol=0
    )


def test_a_header_is_kept_until_the_file_is_another(tmp_path: Path) -> None:
    path, other = tmp_path / "tiny.gguf", tmp_path / "other.gguf"
    write_gguf(build(LLAMA), path, "llama")
    first = read_header(path)
    first.metadata["llama.block_count"] = 99
    again = read_header(path)
    assert again.metadata["llama.block_count"] == 3
    assert again.tensors == first.tensors
    other.write_bytes(path.read_bytes().replace(b"blk.0.attn_v.weight", b"blk.0.attn_w.weight"))
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    other.replace(path)
    os.utime(path, ns=times)
    assert "blk.0.attn_w.weight" in read_header(path).tensors


def test_the_header_is_read_without_the_vocabulary(tmp_path: Path) -> None:
    write_gguf(build(LLAMA), tmp_path / "tiny.gguf", "llama")
    header = read_header(tmp_path / "tiny.gguf")
    assert "tokenizer.ggml.tokens" not in header.metadata
    assert "tokenizer.ggml.token_type" not in header.metadata
    assert header.metadata["llama.block_count"] == 3
    assert header.shapes["blk.0.ffn_down.weight"] == (48, 80)
