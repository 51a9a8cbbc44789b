"""Weights that stay packed: as GGUF files hold them, rounded to int8 and int4, and on disk."""

from __future__ import annotations

import logging
import os
import resource
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from ramify import cache
from ramify.errors import InvalidRequest, RamifyError
from ramify.kernels.weights.packed import pack, unpack
from ramify.kernels.weights.rows import Rows
from ramify.runtime.model import packed_cache
from ramify.runtime.model.checkpoint import ModelFiles
from ramify.runtime.model.gguf import blocks
from ramify.runtime.model.gguf.blocks import rows_of
from ramify.runtime.model.gguf.header import read_header
from ramify.runtime.model.gguf.weights import tensors_in_file
from ramify.runtime.model.layers import Linear
from ramify.runtime.model.loading.load import Model, load_model
from ramify.runtime.model.quantization import resolve_quantization

from .checkpoints import Case, build, expected, prompt, save
from .dense import logits
from .equality import compiled, native, packed_head
from .gguf_files import SCALES_AT, random_blocks, write_gguf

pytestmark = pytest.mark.slow

FOUR_BITS = ["Q2_K", "Q3_K", "Q4_0", "Q4_1", "Q4_K", "IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4"]
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA = Case("llama", "llama", SHAPE)
QWEN2 = Case("qwen2", "qwen2", {**SHAPE, "tie_word_embeddings": True})
GEMMA2 = Case("gemma2", "gemma2", {**SHAPE, "head_dim": 16, "initializer_range": 0.2})


@pytest.mark.parametrize("kind", SCALES_AT)
def test_blocks_stand_for_the_same_numbers(kind: str) -> None:
    """Random bytes give the same numbers as `gguf` makes of them, to the bit."""
    type_ = GGMLQuantizationType[kind]
    shape = (40, 3 * GGML_QUANT_SIZES[type_][0])
    raw = random_blocks(shape, type_)
    rows = rows_of(raw.reshape(-1), type_, shape)
    wanted = dequantize(raw, type_)
    assert np.abs(wanted).max() > 0
    assert np.array_equal(rows.values().numpy(), wanted)
    assert torch.equal(unpack(pack(rows, inputs=shape[1])), rows.values())
    both = rows.index_select(torch.arange(39, -1, -1)).joined(rows)
    joined = torch.from_numpy(np.concatenate([wanted[::-1], wanted]))
    assert torch.equal(unpack(pack(both, inputs=shape[1], gated=True)), joined)
    assert rows.format == ("int4" if kind in FOUR_BITS else "int8")


def test_rows_of_other_widths_are_not_joined() -> None:
    kind = GGMLQuantizationType.Q8_0
    parts = [rows_of(random_blocks((16, width), kind).reshape(-1), kind, (16, width)) for width in (96, 64)]
    with pytest.raises(ValueError, match="rows of one width"):
        parts[0].joined(parts[1])  # type: ignore[union-attr, arg-type]


def test_values_are_dequantised_by_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed tensor is never expanded as a whole."""
    sizes: list[int] = []

    def counted(raw: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
        found = dequantize(raw, kind)
        sizes.append(found.size)
        return found

    monkeypatch.setattr(blocks, "dequantize", counted)
    kind = GGMLQuantizationType.IQ3_S
    raw = random_blocks((2048, 512), kind)
    rows = rows_of(raw.reshape(-1), kind, (2048, 512))
    assert sizes == [512], "the first row tells the shapes"
    assert np.array_equal(rows.decoded().values().numpy(), dequantize(raw, kind))
    assert sizes[1:] == [blocks.CHUNK] * 2


def test_types_without_a_packed_form_come_as_floats(tmp_path: Path) -> None:
    kinds = {"attn_q": GGMLQuantizationType.BF16, "attn_k": GGMLQuantizationType.F16}
    path = tmp_path / "tiny.gguf"
    write_gguf(build(LLAMA), path, "llama", matrices=GGMLQuantizationType.Q8_0, others=kinds)
    for name, entry in tensors_in_file(read_header(path), torch.float32, quantised=True):
        plain = any(part in name for part in ("q_proj", "k_proj", "norm", "embed"))
        assert isinstance(entry, torch.Tensor if plain else Rows), name


def loaded(path: Path, quantization: str, dtype: torch.dtype = torch.float32, **options: Any) -> Model:
    """The packed model, once its copy is on disk."""
    model = compiled(path, quantization, dtype=dtype, packed=True, **options)
    cache.finish()
    return model


MIXES: list[dict[str, GGMLQuantizationType]] = [
    {},
    {"attn_v": GGMLQuantizationType.Q8_0, "ffn_down": GGMLQuantizationType.Q8_0},
    {"attn_k": GGMLQuantizationType.F32, "ffn_up": GGMLQuantizationType.Q8_0},
]


@pytest.mark.parametrize("mix", MIXES, ids=["one type", "mixed", "mixed with float32"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0"])
@pytest.mark.parametrize("case", [LLAMA, QWEN2], ids=lambda case: case.name)
def test_a_gguf_file_as_it_is(case: Case, kind: str, mix: dict, tmp_path: Path) -> None:
    """The logits of the dequantised weights, up to the order of summation."""
    path = tmp_path / "tiny.gguf"
    write_gguf(build(case), path, case.model_type, matrices=GGMLQuantizationType[kind], others=mix)
    ids = prompt()
    model = loaded(path, "gguf")
    wanted = logits(native(path), ids)
    torch.testing.assert_close(logits(model, ids), wanted, atol=1e-4 * wanted.std().item(), rtol=0)
    head = packed_head(model)
    assert head.format == ("int4" if kind.startswith("Q4") else "int8")
    assert all(layer.mlp.down.packed for layer in model.layers)


MIXED = {
    "attn_q": "Q3_K",
    "attn_k": "IQ4_NL",
    "attn_v": "Q6_K",
    "attn_output": "MXFP4",
    "ffn_gate": "IQ4_XS",
    "ffn_up": "Q5_K",
    "ffn_down": "IQ3_S",
    "token_embd": "IQ4_XS",
    "output": "IQ2_XS",
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_gguf_file_of_many_types(tied: bool, tmp_path: Path) -> None:
    """Logits of transformers with the dequantised values."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 2}
    reference = build(Case("", "llama", {**shape, "tie_word_embeddings": tied}))
    path = tmp_path / "tiny.gguf"
    types = {short: GGMLQuantizationType[name] for short, name in MIXED.items()}
    write_gguf(reference, path, "llama", others=types, random=True)
    ids = prompt()
    wanted = expected(reference, ids)
    plain = native(path)
    deviation = wanted.std().item()
    torch.testing.assert_close(logits(plain, ids), wanted, atol=1e-4 * deviation, rtol=0)
    model = loaded(path, "gguf")
    torch.testing.assert_close(logits(model, ids), wanted, atol=1e-4 * deviation, rtol=0)
    head = packed_head(model)
    assert head.format == ("int4" if tied else "int8")
    assert all(module.packed for module in model.modules() if isinstance(module, Linear))
    embedding = reference.get_input_embeddings().weight
    assert torch.equal(model.embedding, embedding), "looked up, and so not rounded"


def test_a_gelu_gate_is_no_part_of_its_packed_product(tmp_path: Path) -> None:
    """Gemma 2: norms with an offset, and a gate that the kernels do not have."""
    path = tmp_path / "tiny.gguf"
    write_gguf(build(GEMMA2), path, "gemma2", matrices=GGMLQuantizationType.Q8_0)
    ids = prompt()
    model = loaded(path, "gguf")
    assert [weight.gated for weight in model.layers[0].mlp.gate_up.packed] == [False]
    wanted = logits(native(path), ids)
    torch.testing.assert_close(logits(model, ids), wanted, atol=1e-4 * wanted.std().item(), rtol=0)


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("case", [LLAMA, QWEN2, GEMMA2], ids=lambda case: case.name)
def test_rounded_weights(case: Case, form: str, tmp_path: Path) -> None:
    """The logits of a plain model that is given the rounded weights."""
    path = save(build(case), tmp_path).weights
    ids = prompt()
    model = loaded(path, form)
    plain = native(path)
    exact = logits(plain, ids)
    for ours, theirs in zip(model.layers.modules(), plain.layers.modules(), strict=True):
        if isinstance(ours, Linear):
            assert [weight.format for weight in ours.packed] == [form]
            theirs.weight.copy_(unpack(ours.packed[0]))
    head = packed_head(model)
    plain.head.weight = torch.nn.Parameter(unpack(head), requires_grad=False)
    rounded = logits(plain, ids)
    torch.testing.assert_close(logits(model, ids), rounded, atol=1e-4 * rounded.std().item(), rtol=0)
    assert (rounded - exact).abs().max() > 1e-3 * exact.std()


def test_bfloat16_is_packed_and_changes_nothing_else(tmp_path: Path) -> None:
    path = save(build(QWEN2), tmp_path).weights
    ids = prompt()
    exact = logits(native(path), ids)
    plain = logits(load_model(ModelFiles("tiny", path, path), dtype=torch.bfloat16), ids)
    model = loaded(path, "none", torch.bfloat16)
    assert packed_head(model) is not None
    assert all(layer.qkv.packed[0].format == "bf16" for layer in model.layers)
    error, plain_error = ((found - exact).square().mean().sqrt() for found in (logits(model, ids), plain))
    assert error <= 1.1 * plain_error


def test_float32_is_not_packed(tmp_path: Path) -> None:
    model = loaded(save(build(LLAMA), tmp_path).weights, "none")
    assert packed_head(model) is None
    assert not any(layer.qkv.packed for layer in model.layers)


def test_what_auto_means(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    assert resolve_quantization("auto", file, exact=False) == "gguf"
    assert resolve_quantization("auto", file, exact=True) == "none"
    assert resolve_quantization("auto", tmp_path, exact=False) == "none"
    assert resolve_quantization("int4", file, exact=True) == "int4"
    with pytest.raises(InvalidRequest, match="no GGUF file"):
        resolve_quantization("gguf", tmp_path, exact=False)


def test_other_devices_refuse_by_name(tmp_path: Path) -> None:
    files = save(build(LLAMA), tmp_path)
    with pytest.raises(RamifyError, match="quantization"):
        load_model(files, dtype=torch.bfloat16, device="meta", quantization="int8")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("RAMIFY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def written(case: Case, tmp_path: Path, matrices: str = "Q4_1") -> Path:
    """A file that is large enough to be cached: it ends in a hole."""
    path = tmp_path / "tiny.gguf"
    kinds = {"attn_v": GGMLQuantizationType.Q8_0, "ffn_up": GGMLQuantizationType.F16}
    write_gguf(build(case), path, case.model_type, matrices=GGMLQuantizationType[matrices], others=kinds)
    os.truncate(path, packed_cache.CACHED_FROM)
    return path


@pytest.mark.parametrize("quantization", ["gguf", "none", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [LLAMA, QWEN2], ids=lambda case: case.name)
def test_the_second_load_only_maps(
    case: Case, dtype: torch.dtype, quantization: str, home: Path, tmp_path: Path
) -> None:
    path = written(case, tmp_path)
    fresh = logits(loaded(path, quantization, dtype, packed_cache=0), prompt())
    assert not home.exists()
    assert torch.equal(logits(loaded(path, quantization, dtype), prompt()), fresh)
    if quantization != "none" or dtype == torch.bfloat16:  # then the file's weights are not read again
        stat, header = path.stat(), max(info.offset for info in read_header(path).tensors.values())
        with path.open("r+b") as file:
            file.seek(header)
            file.write(bytes(100))
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert torch.equal(logits(loaded(path, quantization, dtype), prompt()), fresh)


def entries(home: Path) -> list[Path]:
    return sorted(path for path in home.glob("packed/*/*") if path.is_dir())


def test_a_model_does_not_wait_for_the_disk(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, flush = threading.Event(), cache._flush
    monkeypatch.setattr(cache, "_flush", lambda path: (go_on.wait(30), flush(path)))
    model = compiled(written(LLAMA, tmp_path), "gguf", packed=True)
    (unfinished,) = entries(home)
    assert unfinished.name.startswith("."), "it is not on disk yet"
    go_on.set()
    before = logits(model, prompt())
    cache.finish()
    (entry,) = entries(home)
    assert unfinished.name.startswith(f".{entry.name}.")
    assert torch.equal(logits(model, prompt()), before), "what is mapped stays"


def test_a_full_disk_is_no_reason_to_fail(
    home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, limits = written(LLAMA, tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        assert packed_head(loaded(path, "gguf")) is not None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "cannot be cached" in caplog.text
    assert not entries(home)


def test_another_file_is_packed_anew_and_the_old_one_goes(home: Path, tmp_path: Path) -> None:
    path = written(LLAMA, tmp_path)
    before = logits(loaded(path, "gguf"), prompt())
    (old,) = entries(home)
    written(LLAMA, tmp_path, "Q4_0")
    os.utime(path, ns=(1, 1))
    assert not torch.equal(before, logits(loaded(path, "gguf"), prompt()))
    (new,) = entries(home)
    assert new != old
    loaded(path, "int8")
    assert new in entries(home), "another format is another entry"


def test_the_least_recently_used_goes_where_room_ends(home: Path, tmp_path: Path) -> None:
    path = written(LLAMA, tmp_path)
    for quantization in ("gguf", "int8"):
        loaded(path, quantization)
    first = next(entry for entry in entries(home) if "int8" not in str(entry))
    for part in home.rglob("*"):
        os.utime(part, (1, 1))
    loaded(path, "gguf", packed_cache=sum(part.stat().st_size for part in first.rglob("*")))
    assert entries(home) == [first]
    loaded(path, "int8", packed_cache=0)
    assert entries(home) == [first], "none is kept"


def test_a_model_larger_than_the_room_is_not_kept(
    home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded(written(LLAMA, tmp_path), "gguf", packed_cache=1000)
    assert not entries(home)
    assert "packed_cache_gb" in caplog.text


def test_where_nothing_can_be_written_it_packs_at_every_start(
    home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(LLAMA, tmp_path)
    home.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        model = loaded(path, "gguf")
    assert "cannot be cached" in caplog.text
    assert packed_head(model) is not None
