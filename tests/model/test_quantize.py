"""`ramify quantize` writes what the formats' own libraries would, by parts, and says the error."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

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
from ramify.runtime.quantize.errors import class_of
from ramify.runtime.quantize.folder import ROWS, write_folder
from ramify.runtime.quantize.gguf_file import write_gguf
from ramify.runtime.quantize.quality import measured

from .checkpoints import Case, build, change, save
from .gguf_files import write_gguf as write_source
from .harmony import write_harmony_tokenizer
from .test_resolve import save_tokenizer

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA = Case("llama", "llama", {**SHAPE, "vocab_size": 320})


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
    """The numbers of a tensor by compressed-tensors' description of pack-quantized."""
    outputs, inputs = tensors[f"{name}_shape"].tolist()
    rows, columns, each = torch.arange(outputs)[:, None], torch.arange(inputs), 32 // bits
    words, scale = tensors[f"{name}_packed"].long(), tensors[f"{name}_scale"].float()
    mask, zeros = (1 << bits) - 1, tensors.get(f"{name}_zero_point")
    codes = words[rows, columns // each] >> bits * (columns % each) & mask
    zero = torch.tensor(1 << bits - 1)
    if zeros is not None:
        zero = zeros.long()[rows // each, columns // group] >> bits * (rows % each) & mask
    return scale[rows, columns // group] * (codes - zero)


@pytest.mark.parametrize(("to", "bits", "group", "steps"), [("int8", 8, 64, 127), ("int4", 4, 32, 15)])
def test_a_folder_is_packed_as_compressed_tensors_says(
    to: str, bits: int, group: int, steps: int, tmp_path: Path
) -> None:
    """Also matrices of more numbers than are quantised at a time."""
    wide = {"num_hidden_layers": 1, "hidden_size": 1024, "intermediate_size": ROWS // 1024 + 32}
    save(build(Case("", "llama", LLAMA.options | wide), dtype=torch.bfloat16), tmp_path / "in")
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
    name = "model.layers.0.mlp.gate_proj.weight"
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


def test_what_cannot_be_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(build(LLAMA), tmp_path / "in")
    save_tokenizer(tmp_path / "in")
    with pytest.raises(UnsupportedField, match="a type of GGUF files"):
        write_folder(tmp_path / "in", tmp_path / "out", "q4_0")
    assert main(["quantize", str(tmp_path / "in"), str(tmp_path / "in")]) == FAILED
    assert "exists. Name a new file or folder" in capsys.readouterr().err
    assert main(["quantize", str(tmp_path / "in"), str(tmp_path / "out"), "--to", "int4"]) == 0
    assert "self_attn.q_proj" in capsys.readouterr().out
    with pytest.raises(UnsupportedField, match="quantised already"):
        write_folder(tmp_path / "out", tmp_path / "again", "int4")


def test_ctrl_c_leaves_nothing_by_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(build(LLAMA), tmp_path / "in")
    save_tokenizer(tmp_path / "in")
    target = tmp_path / "out"
    interrupt = lambda *_: signal.raise_signal(signal.SIGINT)  # noqa: E731
    monkeypatch.setattr("ramify.runtime.quantize.folder._write_file", interrupt)
    assert main(["quantize", str(tmp_path / "in"), str(target)]) == 130
    said = f"{target} is not written. To begin anew: ramify quantize {tmp_path / 'in'} {target}\n"
    assert capsys.readouterr().err.endswith(f"ramify: interrupted.\n{said}")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


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


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A folder with a tokenizer of bytes, which are tokens of `LLAMA`."""
    write_harmony_tokenizer(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_the_check_tells_more_bits_from_fewer(source: Path, tmp_path: Path, tokenizer: Path) -> None:
    files = ModelFiles("tiny", source, tokenizer)
    found = {}
    for to in ("int8", "q4_0"):
        write_gguf(source, tmp_path / f"{to}.gguf", to)
        exact, found[to] = measured(files, ModelFiles("tiny", tmp_path / f"{to}.gguf", tokenizer), 64)
        assert found[to].perplexity == pytest.approx(exact, rel=0.5)
    assert 0 < 3 * found["int8"].divergence < found["q4_0"].divergence


def test_the_check_computes_what_is_packed(
    tmp_path: Path, tokenizer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(build(LLAMA, dtype=torch.bfloat16), tmp_path / "in")
    write_folder(tmp_path / "in", tmp_path / "out", "int8")
    measured(*(ModelFiles("", tmp_path / name, tokenizer) for name in ("in", "out")), 16)
    assert "dequantised" not in caplog.text


def test_the_check_reads_what_the_context_holds(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The text has more tokens than many models' context."""
    save(build(LLAMA), tmp_path / "in")
    shutil.copytree(tokenizer, tmp_path / "in", dirs_exist_ok=True)
    assert main(["quantize", str(tmp_path / "in"), str(tmp_path / "out"), "--check"]) == 0
    assert "of 128 tokens" in capsys.readouterr().out


def test_a_check_that_fails_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(build(LLAMA), tmp_path / "in")
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    command = ["quantize", str(tmp_path / "in"), str(tmp_path / "out"), "--check"]
    assert main(command) == FAILED
    assert "The check of" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    change(tmp_path / "in", model_type="olmo")
    assert main(command) == FAILED, "before anything is written"
    assert "model_type" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
