"""Checkpoints that are quantised themselves: the values of their matrices, and the logits of whole models."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ramify.errors import InvalidRequest, UnsupportedField
from ramify.kernels.reference.float8 import float8_matmul
from ramify.kernels.reference.quantised import quantised_matmul
from ramify.kernels.registry import ops
from ramify.kernels.weights.packed import pack, unpack
from ramify.kernels.weights.quantised import QuantisedWeight, multiplies_float8
from ramify.kernels.weights.rows import Rows
from ramify.runtime.model.layers import Linear
from ramify.runtime.model.quantised import matrix_tensors, mxfp4
from ramify.runtime.model.quantization import resolve_quantization
from ramify.runtime.model.shape.quantised_config import quantised_of

from . import quantised_files as files
from .checkpoints import Case, build, expected, prompt
from .dense import logits
from .equality import compiled

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def test_mxfp4_has_the_values_of_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.randint(256, (1, 40, 3, 16), dtype=torch.uint8)
    scales = torch.randint(250, (1, 40, 3), dtype=torch.uint8)
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[0].t()
    rows = mxfp4(blocks[0], scales[0])
    assert torch.equal(rows.values(), wanted)
    assert torch.equal(unpack(pack(rows, inputs=96)), wanted)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True}
DYNAMIC = {**files.FLOAT, "strategy": "token", "dynamic": True}
STATIC = {**files.FLOAT, "strategy": "tensor", "dynamic": False}
SCHEMES: dict[str, tuple[dict[str, Any], files.Quantise, str]] = {
    "fp8 by output, dynamic": (
        files.compressed("float-quantized", {**files.FLOAT, "strategy": "channel"}, activations=DYNAMIC),
        files.fp8("weight_scale", torch.bfloat16),
        "fp8",
    ),
    "fp8 by tensor, static": (
        files.compressed("float-quantized", {**files.FLOAT, "strategy": "tensor"}, activations=STATIC),
        files.fp8("weight_scale", torch.float32, tensor=True),
        "fp8",
    ),
    "fp8 in blocks": (
        {"quant_method": "fp8", "weight_block_size": [64, 64], "activation_scheme": "dynamic"},
        files.fp8("weight_scale_inv", torch.float32, block=64),
        "fp8",
    ),
    "int8 by output": (
        files.compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
        files.int8,
        "int8",
    ),
    "packed 4 bits": (
        files.compressed("pack-quantized", files.integers(4, 64)),
        files.packed(4, 64, symmetric=True),
        "int4",
    ),
    "packed 4 bits with zero points, ordered": (
        files.compressed("pack-quantized", files.integers(4, 32, symmetric=False)),
        files.packed(4, 32, symmetric=False, ordered=True),
        "int4",
    ),
    "packed 8 bits with zero points": (
        files.compressed("pack-quantized", files.integers(8, 64, symmetric=False)),
        files.packed(8, 64, symmetric=False),
        "int8",
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, files.awq(32), "int4"),
    "gptq": (GPTQ, files.gptq(4, 64, symmetric=True), "int4"),
    "gptq, ordered": (
        {**GPTQ, "desc_act": True, "sym": False},
        files.gptq(4, 64, symmetric=False, ordered=True),
        "int4",
    ),
    "gptq, 8 bits, version 2, one group": (
        {**GPTQ, "bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"},
        files.gptq(8, 0, symmetric=False, shift=0),
        "int8",
    ),
}
# 1.5 and 2.5 groups of 64 inputs.
LLAMA = Case("", "llama", {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 4})


@pytest.mark.parametrize("name", SCHEMES)
def test_a_quantised_checkpoint_has_the_logits_of_its_values(name: str, tmp_path: Path) -> None:
    """Logits of packed, laid out and dequantised weights are transformers' with the formula's values.

    One matrix is left unquantised."""
    config, quantise, form = SCHEMES[name]
    reference = files.write(build(LLAMA), tmp_path, config, quantise, skip="layers.1.mlp.up_proj")
    ids = prompt()
    wanted = expected(reference, ids)
    deviation = wanted.std().item()
    packed, plain = compiled(tmp_path, "checkpoint", packed=True), compiled(tmp_path, "none", packed=True)
    for_gpu = compiled(tmp_path, "checkpoint", quantised=True)
    for layer in packed.layers:
        (attention,) = layer.qkv.packed
        assert attention.format == form
        assert (len(attention.order) > 0) == ("ordered" in name)
        assert all(weight.format == form for weight in layer.mlp.down.packed)
    assert not packed.layers[1].mlp.gate_up.packed, "float32 stays unpacked, and the gate beside it"
    for layer in for_gpu.layers:
        ((_, weight, _),) = layer.qkv.quantised
        assert weight.form == form
        assert (weight.order is not None) == ("ordered" in name)
        assert not layer.qkv.weight.numel()
    kinds = [type(weight) for _, weight, _ in for_gpu.layers[1].mlp.gate_up.quantised]
    assert kinds == [QuantisedWeight, torch.Tensor], "the gate, and what was left alone beside it"
    down = reference.get_submodule("model.layers.0.mlp.down_proj")
    assert torch.equal(plain.layers[0].mlp.down.weight, down.weight)
    for model in (packed, for_gpu, plain):
        torch.testing.assert_close(logits(model, ids), wanted, atol=1e-4 * deviation, rtol=0)


def rounding(x: torch.Tensor, weight: QuantisedWeight, *given: Any, **options: Any) -> torch.Tensor:
    """Rounding of activations as the kernel of this name has it, by the twins."""
    chosen = float8_matmul if multiplies_float8(weight) else quantised_matmul
    return chosen(x, weight, *given, **options)


@pytest.mark.parametrize("name", ["fp8 by output, dynamic", "fp8 by tensor, static", "fp8 in blocks"])
def test_activations_are_rounded_where_the_checkpoint_says_so(name: str, tmp_path: Path) -> None:
    """Inputs of four bits are noise of 2.6 %, which this model of random weights makes 28 % of its logits'
    deviation, whatever the noise is."""
    config, quantise, _ = SCHEMES[name]
    reference = files.write(build(LLAMA), tmp_path, config, quantise, skip="layers.1.mlp.up_proj")
    model, ids = compiled(tmp_path, "checkpoint", quantised=True), prompt()
    wanted = expected(reference, ids)
    seen = {
        multiplies_float8(weight)
        for module in model.modules()
        if isinstance(module, Linear)
        for _, weight, _ in module.quantised
        if isinstance(weight, QuantisedWeight)
    }
    assert seen == {True}
    model.use_kernels(dataclasses.replace(ops("torch"), quantised_matmul=rounding))
    apart = (logits(model, ids) - wanted).std() / wanted.std()
    assert 0.1 < apart < 0.4


def test_a_checkpoint_of_weights_alone_keeps_its_activations() -> None:
    """Activations stay with FP8 weights alone (W8A16), with int8, and in a group without input
    activations."""
    weights_only = files.compressed("float-quantized", {**files.FLOAT, "strategy": "channel"})
    groups = {
        "a": {"targets": ["Linear"], "weights": files.FLOAT, "input_activations": DYNAMIC},
        "b": {"targets": ["re:.*down_proj"], "weights": files.FLOAT},
    }
    both = files.compressed("float-quantized", {}, config_groups=groups)
    rounded = [
        rows_of(name, {"weight": weight, "weight_scale": torch.ones(8, 1)}, config).float8_activations
        for name, weight, config in (
            ("up_proj", torch.ones(8, 64).to(torch.float8_e4m3fn), weights_only),
            ("up_proj", torch.ones(8, 64).to(torch.float8_e4m3fn), both),
            ("down_proj", torch.ones(8, 64).to(torch.float8_e4m3fn), both),
            ("up_proj", torch.ones(8, 64).char(), both),
        )
    ]
    assert rounded == [False, True, False, False]


def billion(folder: Path, config: dict[str, Any], matrix: Callable[[int, int], dict[str, Any]]) -> Path:
    """A Llama of 1.1 billion weights, all zero: its file is a hole, and takes no room on disk."""
    hidden, size, layers, vocabulary = 2048, 8192, 18, 1024
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        "model.embed_tokens.weight": ("BF16", (vocabulary, hidden)),
        "lm_head.weight": ("BF16", (vocabulary, hidden)),
        "model.norm.weight": ("BF16", (hidden,)),
    }
    shapes = {f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
    shapes |= {
        "mlp.gate_proj": (size, hidden),
        "mlp.up_proj": (size, hidden),
        "mlp.down_proj": (hidden, size),
    }
    for layer in range(layers):
        stem = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{stem}{name}.weight"] = ("BF16", (hidden,))
        for name, shape in shapes.items():
            tensors |= {f"{stem}{name}.{part}": found for part, found in matrix(*shape).items()}
    header, end = {}, 0
    for name, (dtype, found) in tensors.items():
        start, end = end, end + math.prod(found) * {"BF16": 2, "F16": 2, "I32": 4, "F8_E4M3": 1}[dtype]
        header[name] = {"dtype": dtype, "shape": found, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    fields = {
        "model_type": "llama", "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": size,
        "num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": 32,
        "max_position_embeddings": 2048, "quantization_config": config,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return folder


def test_a_packed_model_is_never_expanded_as_a_whole(tmp_path: Path) -> None:
    """Loading 1.1 billion weights of four bits takes the file, the packed model, and a third of it besides.

    All of them as bytes would be 2 bytes for each byte of the file, and as bfloat16 4.
    """

    def matrix(outputs: int, inputs: int) -> dict[str, Any]:
        return {
            "qweight": ("I32", (inputs // 8, outputs)),
            "qzeros": ("I32", (inputs // 128, outputs // 8)),
            "scales": ("F16", (inputs // 128, outputs)),
        }

    folder = billion(tmp_path, {**GPTQ, "group_size": 128}, matrix)
    code = """
import resource, sys, torch
from pathlib import Path
from ramify.runtime.model import packed_cache
from ramify.runtime.model.loading import load
from ramify.runtime.model.checkpoint import ModelFiles
packed_cache.CACHED_FROM = 1 << 60
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
torch.ones(2, 2) @ torch.ones(2, 2)
before, folder = peak(), Path(sys.argv[1])
files = ModelFiles("zeros", folder, folder)
model = load.load_model(files, dtype=torch.bfloat16, quantization="checkpoint", packed=True)
print(peak() - before, sum(weight.panels.nbytes + weight.scales.nbytes
    for module in model.modules() for weight in getattr(module, "packed", [])))
"""
    found = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    peak, packed = map(int, found.stdout.split())
    stored = (folder / "model.safetensors").stat().st_size
    assert packed > 0.5e9
    assert peak < stored + 1.33 * packed


REFUSED = [
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version"),
    ({**GPTQ, "bits": 3}, "bits"),
    ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format"),
    ({**GPTQ, "group_size": 24}, "group_size"),
    ({**GPTQ, "dynamic": {"+:down_proj": {"bits": 8}}}, "dynamic"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt"),
    (files.compressed("pack-quantized", files.integers(3, 64)), "num_bits"),
    (files.compressed("nvfp4-pack-quantized", files.integers(4, 16)), "format"),
    (files.compressed("float-quantized", files.FLOAT, kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
    (
        files.compressed("dense", files.FLOAT, sparsity_config={"format": "sparse-24-bitmask"}),
        r"sparsity_config\.format",
    ),
]


@pytest.mark.parametrize(("config", "field"), REFUSED, ids=[field for _, field in REFUSED])
def test_what_is_not_known_is_refused_by_name(config: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedField, match=rf"quantization_config.*{field} = "):
        quantised_of({"quantization_config": config})


def test_a_quantised_checkpoint_is_not_quantised_again(tmp_path: Path) -> None:
    known = quantised_of({"quantization_config": GPTQ})
    for exact, found in ((False, "checkpoint"), (True, "none")):
        assert resolve_quantization("auto", tmp_path, exact=exact, quantised=known) == found
    assert resolve_quantization("none", tmp_path, exact=False, quantised=known) == "none"
    with pytest.raises(UnsupportedField, match="already"):
        resolve_quantization("int4", tmp_path, exact=False, quantised=known)


def test_scales_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Refusals of a group size other than the matrices', and of an order whose groups have another size."""
    for config, quantise, words in (
        (
            files.compressed("pack-quantized", files.integers(4, 128)),
            files.packed(4, 64, symmetric=True),
            "has scales",
        ),
        ({**GPTQ, "group_size": 48}, files.gptq(4, 64, symmetric=True, ordered=True), "g_idx"),
    ):
        files.write(build(LLAMA), tmp_path, config, quantise)
        with pytest.raises(InvalidRequest, match=words):
            compiled(tmp_path, "checkpoint", packed=True)


Parts = dict[str, torch.Tensor]


def rows_of(name: str, parts: Parts, config: dict[str, Any]) -> Rows:
    known = quantised_of({"quantization_config": config})
    assert known is not None
    names = {part: f"{name}.{part}" for part in parts}
    ((_, rows), *_) = matrix_tensors(name, names, lambda full: parts[full.rpartition(".")[2]], known)
    assert isinstance(rows, Rows)
    return rows


BROKEN: list[tuple[str, str, Callable[[torch.Tensor], torch.Tensor] | None, str]] = [
    ("gptq", "qzeros", None, "lacks qzeros"),
    ("gptq", "scales", None, "lacks scales"),
    ("packed 4 bits", "weight_shape", None, "lacks weight_shape"),
    ("packed 4 bits", "weight_shape", lambda shape: shape[:1], "do not fit"),
    ("packed 4 bits", "weight_shape", lambda shape: shape + torch.tensor([1, 0]), "has the shape"),
    ("packed 4 bits", "weight_packed", lambda words: words.long(), "int64; int32 is needed"),
    ("fp8 by output, dynamic", "weight", None, "lacks weight"),
    ("fp8 by output, dynamic", "weight", lambda weight: weight[None], "do not fit"),
    ("fp8 by output, dynamic", "weight_scale", lambda scale: scale * math.nan, "not finite"),
    ("gptq", "g_idx", lambda index: index[:-8], "has a g_idx"),
    ("awq", "qzeros", lambda zeros: zeros[:, :-1], "has zero points"),
    ("awq", "qzeros", lambda zeros: zeros[:-1], "has zero points"),
    ("packed 8 bits with zero points", "weight_zero_point", lambda zeros: zeros[:-1], "has zero points"),
]


@pytest.mark.parametrize(("scheme", "part", "change", "words"), BROKEN)
def test_parts_that_do_not_fit_are_refused_with_the_matrix(
    scheme: str, part: str, change: Callable[[torch.Tensor], torch.Tensor] | None, words: str
) -> None:
    config, quantise, _ = SCHEMES[scheme]
    parts, _ = quantise(torch.randn(96, 160))
    rows_of("layers.0.down_proj", parts, config)
    changed = parts.pop(part)
    if change is not None:
        parts[part] = change(changed)
    with pytest.raises(InvalidRequest, match=rf"matrix layers\.0\.down_proj .*{words}"):
        rows_of("layers.0.down_proj", parts, config)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (files.compressed("pack-quantized", files.FLOAT, config_groups=[1]), "config_groups"),
        (files.compressed("pack-quantized", files.FLOAT, config_groups={"a": 1}), r"config_groups\.a"),
        ({**GPTQ, "dynamic": ["x"]}, "dynamic"),
    ],
)
def test_fields_of_a_wrong_type_are_refused_by_name(config: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedField, match=rf"quantization_config\.{field} = "):
        quantised_of({"quantization_config": config})


def test_a_matrix_has_the_layout_of_its_config_group() -> None:
    """160 inputs are two groups of 96 and two of 128: the scales cannot tell which."""

    def group(size: int, *targets: str) -> dict[str, Any]:
        weights = {"num_bits": 8, "type": "int", "strategy": "group", "group_size": size}
        return {"targets": list(targets), "weights": weights}

    groups = {
        "a": group(96, "Linear"),
        "b": group(128, r"re:.*\.up_proj"),
        "c": group(80, "layers.1.down_proj"),
    }
    config = files.compressed("int-quantized", {}, config_groups=groups)
    parts = {"weight": torch.ones(16, 160, dtype=torch.int8), "weight_scale": torch.ones(16, 2)}
    for name, inputs in (("layers.0.down_proj", 96), ("layers.0.up_proj", 128), ("layers.1.down_proj", 80)):
        assert rows_of(name, parts, config).group == inputs
    del groups["a"]
    with pytest.raises(InvalidRequest, match=r"0 layouts .* match layers\.0\.down_proj"):
        rows_of("layers.0.down_proj", parts, config)
    groups["d"] = group(96, r"re:layers\.0")
    with pytest.raises(InvalidRequest, match=r"2 layouts .* match layers\.0\.up_proj"):
        rows_of("layers.0.up_proj", parts, config)
