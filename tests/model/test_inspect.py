"""`ramify inspect` gives the figures of the functions that start an engine, and every refusal."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType

from ramify.cli.main import main
from ramify.errors import InvalidRequest, NotFound
from ramify.kernels.weights.packed import pack
from ramify.kernels.weights.quantised import lay_out
from ramify.runtime.config import EngineConfig
from ramify.runtime.executor.build import build_runner
from ramify.runtime.executor.device import resolve_dtype
from ramify.runtime.executor.kv_pool import page_bytes
from ramify.runtime.executor.memory import COW_PAGES, CPU_BYTES, states_in
from ramify.runtime.inspect import report, resolve
from ramify.runtime.inspect.checkpoint import Form, form_of
from ramify.runtime.inspect.machine import Machine, bytes_of, this_machine
from ramify.runtime.inspect.report import WORKSPACE, Inspection, inspected
from ramify.runtime.model.checkpoint import ModelFiles
from ramify.runtime.model.decoder import Model
from ramify.runtime.model.gguf.blocks import rows_of
from ramify.runtime.model.layers import Linear
from ramify.runtime.model.loading.load import load_model, read_config
from ramify.runtime.model.shape.config import ModelShape, StateShape, part_of
from ramify.runtime.quantize.folder import write_folder

from ..hub_server import HubServer
from .architectures import save_tiny, tiny_config
from .checkpoints import Case, build, change, save
from .gguf_files import SCALES_AT, random_blocks, write_gguf
from .test_hub import gguf as gguf
from .test_hub import hub as hub
from .test_hub import server as server
from .test_resolve import save_tokenizer

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"head_dim": 32, "vocab_size": 320, "num_hidden_layers": 2}
"""Sizes that are multiples of a panel, so that nothing is padded."""
CPU = Machine("cpu", "a CPU", 8 << 30, "bfloat16")
CUDA = Machine("cuda", "a GPU", 8 << 30, "bfloat16")


def files_of(path: Path) -> ModelFiles:
    return ModelFiles(path.stem, path, path.parent)


def look(path: Path, machine: Machine = CPU, **options: object) -> Inspection:
    return inspected(files_of(path), machine, EngineConfig(**options), chat=False)  # type: ignore[arg-type]


def loaded_bytes(model: Model) -> int:
    packed = [weight for module in model.modules() if isinstance(module, Linear) for weight in module.packed]
    laid = [part[1] for module in model.modules() if isinstance(module, Linear) for part in module.quantised]
    return sum(each.nbytes for each in (*set(model.parameters()), *laid)) + sum(
        weight.panels.nbytes + weight.scales.nbytes for weight in packed
    )


def write_quantised(path: Path, **options: int) -> Path:
    case = Case("llama", "llama", SIZES | {"tie_word_embeddings": True} | options)
    others = {"attn_v": GGMLQuantizationType.Q8_0, "token_embd": GGMLQuantizationType.F16}
    write_gguf(build(case), path, "llama", matrices=GGMLQuantizationType.Q4_1, others=others)
    return path


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_quantised(tmp_path_factory.mktemp("inspected") / "tiny.gguf")


@pytest.mark.parametrize("quantization", ["gguf", "int8", "none"])
@pytest.mark.parametrize("machine", [CPU, CUDA], ids=lambda machine: machine.device)
def test_weights_take_the_bytes_that_the_loaded_model_has(
    machine: Machine, quantization: str, quantised: Path
) -> None:
    model = load_model(
        files_of(quantised),
        dtype=torch.bfloat16,
        quantization=quantization,  # type: ignore[arg-type]
        packed=machine is CPU,
        quantised=machine is CUDA,
    )
    found = look(quantised, machine, quantization=quantization)
    assert (found.max_running, found.chunk_tokens) == ((128, 512) if machine is CPU else (256, 2048))
    assert found.weight_bytes == loaded_bytes(model)
    assert found.parameters == sum(
        parameter.numel()
        for parameter in build(Case("llama", "llama", SIZES | {"tie_word_embeddings": True})).parameters()
    )
    kept = {form.format: form.kept_as for form in found.formats}
    wanted: tuple[str | None, ...]
    wanted = {"gguf": ("int4", "int8"), "int8": ("int8", "int8"), "none": ("bf16", "bf16")}[quantization]
    if machine is CUDA and quantization == "none":
        wanted = None, None
    assert (kept["Q4_1"], kept["Q8_0"], kept["F32"]) == (*wanted, None)


@pytest.mark.parametrize("kind", SCALES_AT)
def test_each_block_type_is_kept_as_told(kind: str) -> None:
    type_, shape = GGMLQuantizationType[kind], (64, 512)  # nothing is padding
    rows = rows_of(random_blocks(shape, type_).reshape(-1), type_, shape)
    assert rows is not None
    weight, laid = pack(rows, inputs=512), lay_out(rows, inputs=512, device="cpu")
    sizes = {"cpu": (weight.format, weight.panels.nbytes + weight.scales.nbytes)}
    sizes["cuda"] = laid.form, laid.nbytes
    for device, (form, size) in sizes.items():
        assert form_of(kind, "gguf", "bfloat16", device) == Form(form, 8 * size / (64 * 512))


def test_a_rank_takes_the_bytes_of_its_part(tmp_path: Path) -> None:
    path = write_quantised(tmp_path / "tiny.gguf", num_attention_heads=8, num_key_value_heads=4)
    found, whole = look(path, tensor_parallel=2), look(path)
    part = load_model(
        files_of(path),
        shape=part_of(read_config(path), 0, 2),
        dtype=torch.bfloat16,
        quantization="gguf",
        packed=True,
    )
    assert found.weight_bytes == loaded_bytes(part)
    assert (found.ranks, found.divides_by) == (2, [1, 2, 4])
    assert 2 * found.kv_bytes_per_token == whole.kv_bytes_per_token
    assert not found.lora
    refused = look(path, tensor_parallel=8)
    assert [each.subject for each in refused.refused] == ["--tensor-parallel"]
    assert "8 query heads, 4 KV heads" in refused.refused[0].reason


def test_a_folder_that_is_quantised_itself(tmp_path: Path) -> None:
    save(build(Case("llama", "llama", SIZES), dtype=torch.bfloat16), tmp_path / "in")
    write_folder(tmp_path / "in", tmp_path / "out", "int4")
    model = load_model(
        ModelFiles("", tmp_path / "out", tmp_path),
        dtype=torch.bfloat16,
        quantization="checkpoint",
        packed=True,
    )
    found = look(tmp_path / "out")
    assert found.quantization == "checkpoint"
    assert found.weight_bytes == loaded_bytes(model)
    assert found.parameters == look(tmp_path / "in").parameters
    refused = [refusal.subject for refusal in found.refused_options]
    assert refused == ["--cuda-graphs", "--quantization int8", "--quantization int4", "--kv-cache-dtype fp8"]
    rounded = look(tmp_path / "out", quantization="int8")
    assert [refusal.subject for refusal in rounded.refused] == refused[1:2]
    kept = look(tmp_path / "out", kv_cache_dtype="int8")
    assert [refusal.subject for refusal in kept.refused_options] == refused[:3], "fp8 was not asked for"
    assert [(form.format, form.kept_as) for form in found.formats] == [
        ("4-bit codes", "int4"),
        ("BF16", "bf16"),
    ]


def test_unpacked_weights_and_pages_are_those_of_the_runner(quantised: Path) -> None:
    found = look(quantised, dtype="float32")
    config = EngineConfig(dtype="float32", device="cpu", attention_backend="torch")
    runner = build_runner(
        config, lambda dtype, device, ops: load_model(files_of(quantised), dtype=dtype, device=device)
    )
    assert found.weight_bytes == loaded_bytes(runner.model)
    assert found.kv_tokens == (runner.pool.num_pages - COW_PAGES) * runner.pool.page_size
    assert found.page_size == runner.pool.page_size == 16
    assert found.kv_bytes_per_token == page_bytes(runner.model.config, 1, torch.float32)
    room = int(0.9 * CPU.memory) - found.weight_bytes - WORKSPACE
    assert found.kv_tokens_at_most == room // found.kv_bytes_per_token
    assert found.context_length == runner.model.config.context_length


def test_int8_pages_count_their_scales(quantised: Path) -> None:
    wide, narrow = look(quantised), look(quantised, kv_cache_dtype="int8")
    assert (wide.kv_dtype, narrow.kv_dtype) == ("bfloat16", "int8")
    assert wide.kv_bytes_per_token == 2 * 2 * 2 * 2 * 32
    assert narrow.kv_bytes_per_token == 2 * 2 * 2 * (32 + 4)
    assert not narrow.refused
    on_cuda = look(quantised, CUDA, kv_cache_dtype="int8")
    assert [refusal.subject for refusal in on_cuda.refused] == ["--kv-cache-dtype int8"]


def test_states_are_counted_as_the_engine_makes_them() -> None:
    states = StateShape(layers=36, channels=8192, width=4, heads=32, key_dim=128, value_dim=128)
    shape = ModelShape(
        family="toy", vocab_size=256, num_layers=12, num_heads=16, num_kv_heads=2, head_dim=256,
        context_length=1 << 18, windows=(0,) * 12, states=states,
    )  # fmt: skip
    slots = states_in(EngineConfig(max_running=128), shape, CPU_BYTES, torch.device("cpu"))
    facts, problem = report.kv_facts(shape, CPU, EngineConfig(max_running=128, page_size=16), "bfloat16", 0)
    room = int(0.9 * CPU.memory) - WORKSPACE - (slots + 1) * states.bytes
    assert (problem, slots) == (None, 13)
    assert facts["kv_tokens_at_most"] == room // facts["kv_bytes_per_token"]


def test_the_machine_is_the_engines() -> None:
    config = EngineConfig(device="cpu")
    assert this_machine("cpu").dtype == str(resolve_dtype(config, torch.device("cpu"))).removeprefix("torch.")
    assert bytes_of("24GB") == bytes_of(" 24 GiB") == 24 << 30
    assert (bytes_of("1.5k"), bytes_of("100B")) == (1536, 100)
    for wrong in ("much", "24"):
        with pytest.raises(InvalidRequest, match=f"memory is '{wrong}'.*unit.*24GB"):
            bytes_of(wrong)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(build(Case("llama", "llama", {"num_hidden_layers": 1})), tmp_path / "tiny")
    save_tokenizer(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
def test_an_incomplete_folder_is_named(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    (folder / name).unlink()
    assert main(["inspect", "tiny"]) == 1
    assert f"The folder tiny is no complete checkpoint: {name} is missing. " in capsys.readouterr().err
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text("{}")
    assert main(["inspect", "tiny"]) == 1
    assert "The folder tiny is a LoRA adapter" in capsys.readouterr().err


def test_an_unknown_name_is_named(capsys: pytest.CaptureFixture[str], hub: HubServer) -> None:
    for name in ("no-such/model:Q4_K_M", "SmolLM2-135M-Instruct:Q9_X"):
        assert main(["inspect", name]) == 1
        said = capsys.readouterr().err
        assert name.partition(":")[0] in said
    assert "is one file, in Q4_1" in said


def test_a_file_that_ends_early_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - 1)
    with pytest.raises(InvalidRequest, match=r"not a readable safetensors file: .*Fetch it again"):
        look(folder)


def test_a_draft_model_adapters_and_memory_are_judged(folder: Path, tmp_path: Path) -> None:
    files = ModelFiles("tiny", folder, folder)

    def found(draft: ModelFiles | None = None, **options: object) -> tuple[Inspection, list[str]]:
        seen = inspected(files, CPU, EngineConfig(**options), draft=draft, chat=False)  # type: ignore[arg-type]
        return seen, [refusal.subject for refusal in seen.refused]

    alone, none = found()
    with_draft, refused = found(files, draft_model="tiny", context_length=64)
    assert none == refused == []
    assert with_draft.kv_bytes_per_token == 2 * alone.kv_bytes_per_token
    assert with_draft.context_length == 64
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    tokenizer = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(tokenizer.replace('"a":', '"changed":'))
    assert found(ModelFiles("other", other, other), draft_model="other")[1] == ["--draft-model"]
    assert found(kv_memory_gb=500.0)[1] == ["memory"]
    assert found(loras={"a": str(other)})[1] == ["--lora a"]


def test_a_format_is_refused_once_by_its_method(folder: Path) -> None:
    change(folder, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    subjects = [refusal.subject for refusal in look(folder, model_impl="native").refused]
    assert subjects == ["quantization_config.quant_method"]


def test_all_reasons_are_given_and_not_only_the_first(tmp_path: Path) -> None:
    save(build(Case("llama", "llama", {"num_hidden_layers": 1})), tmp_path)
    change(tmp_path, hidden_act="relu", architectures=["LlamaForQuestions"], logit_scale=3.0)
    found = look(tmp_path, dataclasses.replace(CPU, memory=1 << 20), model_impl="native")
    assert {refusal.subject for refusal in found.refused} == {"hidden_act", "architectures", "logit_scale"}
    assert found.implementation is None
    assert not found.fits


def test_formats_metadata_and_memory_are_refused_together(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    metadata: dict[str, int | float | str] = {"rope.scaling.type": "longrope", "attention.value_length": 7}
    write_gguf(build(Case("llama", "llama")), path, "llama", metadata=metadata)
    reasons = {refusal.subject for refusal in look(path).refused}
    assert reasons == {"llama.rope.scaling.type", "llama.attention.value_length"}
    write_gguf(build(Case("llama", "llama")), path, "llama")
    content = bytearray(path.read_bytes())
    at = content.index(b"blk.0.attn_q.weight") + len("blk.0.attn_q.weight") + 4 + 16
    content[at] = int(GGMLQuantizationType.Q8_K)
    path.write_bytes(content)
    found = look(path, dataclasses.replace(CPU, memory=1 << 20))
    assert [refusal.subject for refusal in found.refused] == ["model", "memory"]
    assert "blk.0.attn_q.weight is stored as GGML Q8_K" in found.refused[0].reason


def test_experts_count_where_they_are_chosen_and_options_where_they_are_refused(tmp_path: Path) -> None:
    model = save_tiny(tiny_config("phimoe"), tmp_path)
    found = look(tmp_path)
    assert (found.implementation, found.lora) == ("transformers", False)
    assert found.not_native
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert found.active_parameters == found.parameters - experts + experts * 2 // 8
    refused = [refusal.subject for refusal in found.refused_options]
    quantized = ["--quantization int8", "--quantization int4"]
    assert refused == ["--deterministic", "--cuda-graphs", *quantized, "--kv-cache-dtype fp8"]


def test_a_model_on_the_hub_is_looked_at_by_its_header(
    hub: HubServer, gguf: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repositories["someone/tiny-GGUF"]["tiny.Q4_K_M.gguf"] = gguf + bytes(8 << 20)
    assert main(["inspect", "someone/tiny-GGUF:Q4_K_M", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "llama, by Ramify's own code" in shown
    assert "headers alone were fetched" in shown
    assert [asked for asked in hub.asked if "cdn" in asked] == [
        "GET /cdn/someone/tiny-GGUF/tiny.Q4_K_M.gguf bytes=0-4194303"
    ]


def test_the_format_is_chosen_by_the_memory(
    hub: HubServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def set_memory(size: int) -> None:
        machine = dataclasses.replace(CPU, memory=size)
        monkeypatch.setattr(resolve, "this_machine", lambda: machine)

    small = tmp_path / "small.gguf"
    write_gguf(build(Case("llama", "llama", {"num_hidden_layers": 1})), small, "llama")
    hub.repositories["someone/tiny-GGUF"]["tiny.q3_k_s.gguf"] = small.read_bytes()
    found = look(small)
    needed = found.weight_bytes + WORKSPACE + found.kv_bytes_per_token * found.context_length
    set_memory(int(needed / 0.9) + 2)
    chosen = resolve.resolve("someone/tiny-GGUF").weights
    assert chosen.name == "tiny.q3_k_s.gguf"
    said = capsys.readouterr().err
    assert "chose Q3_K_S (0.00 GiB) of Q3_K_S, Q4_K_M, Q8_0" in said
    assert "Q4_K_M (0.00 GiB) does not run here: its weights take" in said
    set_memory(CPU.memory)
    assert resolve.resolve("someone/tiny-GGUF", progress=False).weights == chosen, "what is there comes first"
    resolve.resolve("someone/tiny-GGUF:Q4_K_M", progress=False)
    assert resolve.resolve("someone/tiny-GGUF", progress=False).weights.name == "tiny.Q4_K_M.gguf"
    set_memory(1)
    with pytest.raises(
        NotFound, match=r"No model of someone/tiny-GGUF runs here\. Q4_K_M .* larger than the memory"
    ):
        resolve.resolve("someone/tiny-GGUF", progress=False)
