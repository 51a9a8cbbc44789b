"""`ramify quantize` writes what the formats' own libraries would, by parts, and says the error."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

from ramify.cli.main import FAILED, main
from ramify.errors import UnsupportedField
from ramify.runtime.model.checkpoint import ModelFiles
from ramify.runtime.model.gguf.header import raw_fields, read_header
from ramify.runtime.model.loading.load import read_config
from ramify.runtime.quantize import folder, gguf_file, quality
from ramify.runtime.quantize.errors import class_of
from ramify.runtime.quantize.folder import write_folder
from ramify.runtime.quantize.gguf_file import write_gguf

from .checkpoints import Case, build, save
from .gguf_files import write_gguf as write_source
from .test_resolve import save_tokenizer

LLAMA = Case(
    "llama",
    "llama",
    {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2},
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF model in three files."""
    path = tmp_path_factory.mktemp("source") / "tiny.gguf"
    write_source(build(LLAMA), path, "llama", matrices=GGMLQuantizationType.F16, per_file=12)
    return path.with_name("tiny-00001-of-00003.gguf")


@pytest.mark.parametrize(("to", "kind"), [("int8", "Q8_0"), ("int4", "Q4_1"), ("q5_0", "Q5_0")])
def test_a_gguf_file_is_as_the_gguf_package_would_write_it(
    to: str, kind: str, source: Path, tmp_path: Path
) -> None:
    report = write_gguf(source, tmp_path / "out.gguf", to)
    before = {
        tensor.name: tensor for path in read_header(source).paths for tensor in GGUFReader(path).tensors
    }
    after = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "out.gguf").tensors}
    assert list(after) == list(before)
    for name, tensor in before.items():
        if len(tensor.shape) == 1:
            np.testing.assert_array_equal(after[name].data, tensor.data)
            continue
        wanted = GGMLQuantizationType["Q8_0" if name in ("token_embd.weight", "output.weight") else kind]
        values = dequantize(tensor.data, tensor.tensor_type)
        assert after[name].tensor_type == wanted
        np.testing.assert_array_equal(after[name].data, quantize(values, wanted))
    entry = report.classes["attn_q"]
    values = [dequantize(t.data, t.tensor_type) for n, t in before.items() if n.endswith("attn_q.weight")]
    rounded = [dequantize(t.data, t.tensor_type) for n, t in after.items() if n.endswith("attn_q.weight")]
    error = np.square(np.stack(values) - np.stack(rounded)).sum() / np.square(np.stack(values)).sum()
    assert entry.relative_error == pytest.approx(error**0.5, rel=1e-5)
    assert (entry.tensors, entry.format) == (3, kind)
    assert report.after == sum(tensor.n_bytes for tensor in after.values())


def test_metadata_and_tokenizer_come_along(source: Path, tmp_path: Path) -> None:
    write_gguf(source, tmp_path / "out.gguf", "int4")
    before, after = raw_fields(source), raw_fields(tmp_path / "out.gguf")
    new = {"general.file_type", "general.quantization_version"}
    assert {name for name in before if name.startswith("split.")} == set(before) - set(after) != set()
    assert all(after[name] == before[name] for name in set(after) - new)
    assert read_header(tmp_path / "out.gguf").metadata["general.file_type"] == 3  # llama.cpp's MOSTLY_Q4_1
    assert read_config(tmp_path / "out.gguf") == read_config(source)


def unpacked(tensors: dict[str, torch.Tensor], name: str, bits: int, group: int) -> torch.Tensor:
    """The numbers of a tensor by compressed-tensors' description of pack-quantized, one by one."""
    outputs, inputs = tensors[f"{name}_shape"].tolist()
    words = tensors[f"{name}_packed"].numpy().view(np.uint32)
    scale, zeros = tensors[f"{name}_scale"].float(), tensors.get(f"{name}_zero_point")
    values, each = torch.empty(outputs, inputs), 32 // bits
    for row in range(outputs):
        for column in range(inputs):
            code = int(words[row, column // each]) >> bits * (column % each) & (1 << bits) - 1
            zero = 1 << bits - 1
            if zeros is not None:
                word = int(zeros.numpy().view(np.uint32)[row // each, column // group])
                zero = word >> bits * (row % each) & (1 << bits) - 1
            values[row, column] = scale[row, column // group] * (code - zero)
    return values


@pytest.mark.parametrize(("to", "bits", "group", "steps"), [("int8", 8, 64, 127), ("int4", 4, 32, 15)])
def test_a_folder_is_packed_as_compressed_tensors_says(
    to: str, bits: int, group: int, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "ROWS", 1000)
    save(build(LLAMA, dtype=torch.bfloat16), tmp_path / "in")
    save_tokenizer(tmp_path / "in")
    report = write_folder(tmp_path / "in", tmp_path / "out", to)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("in", "out"))
    quantised = [name for name in before if f"{name}_packed" in after]
    assert {class_of(name) for name in before} - {class_of(name) for name in quantised} == {
        "embed_tokens", "lm_head", "norm", "input_layernorm", "post_attention_layernorm",
        *({"mlp.down_proj"} if to == "int8" else ()),  # its 96 inputs are no multiple of 64
    }  # fmt: skip
    for name in set(before) - set(quantised):
        assert torch.equal(before[name], after[name])
    name = "model.layers.1.self_attn.k_proj.weight"
    weight, found = before[name].float(), unpacked(after, name, bits, group)
    spread = weight.unflatten(1, (-1, group))
    low, high = spread.amin(-1).clamp(max=0), spread.amax(-1).clamp(min=0)
    step = (spread.abs().amax(-1) if bits == 8 else high - low) / steps
    # Half a step of rounding, half of a zero point, and the scale's in bfloat16 over the whole range.
    allowed = step * (1 + steps * 2**-8)
    assert ((weight - found).unflatten(1, (-1, group)).abs() <= allowed[..., None]).all()
    error = sum(
        (before[n].float() - unpacked(after, n, bits, group)).square().sum()
        for n in quantised
        if "k_proj" in n
    )
    squares = sum(before[n].float().square().sum() for n in quantised if "k_proj" in n)
    assert report.classes["self_attn.k_proj"].relative_error == pytest.approx(
        float((error / squares) ** 0.5), rel=1e-4
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["format"]) == ("compressed-tensors", "pack-quantized")
    assert ("model.layers.0.mlp.down_proj" in config["ignore"]) == (to == "int8")
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_what_cannot_be_written_is_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(build(LLAMA), tmp_path / "in")
    save_tokenizer(tmp_path / "in")
    with pytest.raises(UnsupportedField, match="a type of GGUF files"):
        write_folder(tmp_path / "in", tmp_path / "out", "q4_0")
    assert main(["quantize", str(tmp_path / "in"), str(tmp_path / "out.gguf")]) == FAILED
    assert "Name a folder" in capsys.readouterr().err
    assert main(["quantize", str(tmp_path / "in"), str(tmp_path / "in")]) == FAILED
    assert "exists. Name a new file or folder" in capsys.readouterr().err
    assert main(["quantize", str(tmp_path / "in"), str(tmp_path / "out"), "--to", "int4"]) == 0
    assert "self_attn.q_proj" in capsys.readouterr().out
    with pytest.raises(UnsupportedField, match="quantised already"):
        write_folder(tmp_path / "out", tmp_path / "again", "int4")


def test_experts_that_stay_as_they_are_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = Case("", "qwen2_moe", {"hidden_size": 64, "moe_intermediate_size": 96, "num_experts": 4})
    model = build(case)
    save(model, tmp_path / "in")
    fused = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(fused, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(tmp_path / "in")
    assert main(["quantize", str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    experts = sum(tensor.numel() for tensor in fused.values() if tensor.dim() == 3)
    share = experts / sum(tensor.numel() for tensor in fused.values())
    said = f"experts stored as one tensor, {share:.0%} of the weights"
    assert said in capsys.readouterr().out


def test_the_check_tells_more_bits_from_fewer(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_file, "CHUNK", 4096)
    letters = lambda text, **_: SimpleNamespace(input_ids=[ord(letter) % 90 for letter in text])  # noqa: E731
    monkeypatch.setattr(quality, "load_tokenizer", lambda path: letters)
    files = ModelFiles("tiny", source, tmp_path)
    found = {}
    for to in ("int8", "q4_0"):
        write_gguf(source, tmp_path / f"{to}.gguf", to)
        exact, found[to] = quality.measured(files, ModelFiles("tiny", tmp_path / f"{to}.gguf", tmp_path), 64)
        assert found[to].perplexity == pytest.approx(exact, rel=0.3)
    assert 0 < 3 * found["int8"].divergence < found["q4_0"].divergence


def test_the_check_computes_what_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    letters = lambda text, **_: SimpleNamespace(input_ids=[ord(letter) % 90 for letter in text])  # noqa: E731
    monkeypatch.setattr(quality, "load_tokenizer", lambda path: letters)
    loaded = []
    load = quality.load_model

    def recorded(files: ModelFiles, **options: Any) -> Any:
        loaded.append(options["quantization"])
        return load(files, **options)

    monkeypatch.setattr(quality, "load_model", recorded)
    save(build(LLAMA, dtype=torch.bfloat16), tmp_path / "in")
    write_folder(tmp_path / "in", tmp_path / "out", "int8")
    quality.measured(*(ModelFiles("", tmp_path / name, tmp_path) for name in ("in", "out")), 16)
    assert loaded == ["none", "checkpoint"]


def test_the_check_reads_what_the_context_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text has more tokens than many models' context."""
    save(build(LLAMA), tmp_path / "in")
    save_tokenizer(tmp_path / "in")
    letters = lambda text, **_: SimpleNamespace(input_ids=[ord(letter) % 90 for letter in text])  # noqa: E731
    monkeypatch.setattr(quality, "load_tokenizer", lambda path: letters)
    assert main(["quantize", str(tmp_path / "in"), str(tmp_path / "out"), "--check"]) == 0
    assert "of 128 tokens" in capsys.readouterr().out


def test_a_check_that_fails_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(build(LLAMA), tmp_path / "in")
    save_tokenizer(tmp_path / "in")
    command = ["quantize", str(tmp_path / "in"), str(tmp_path / "out"), "--check"]

    def fails(*args: object) -> None:
        raise MemoryError("too little of it")

    monkeypatch.setattr(quality, "measured", fails)
    assert main(command) == FAILED
    assert "The check of" in (said := capsys.readouterr().err)
    assert "too little of it" in said
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps(config | {"model_type": "olmo"}))
    assert main(command) == FAILED, "before anything is written"
    assert "model_type" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
