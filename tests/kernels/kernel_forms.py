"""Every Triton kernel in every form that the runtime launches, and what each takes of a multiprocessor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from ramify.kernels.arguments.sampling_inputs import LogitEdits, SamplingOptions
from ramify.kernels.triton import (
    activation,
    attention,
    experts,
    float8,
    gated_delta,
    kv_store,
    logits,
    lora,
    matmul,
    norm,
    quantised,
    rope,
    sampling,
)
from ramify.kernels.triton.trials import chunked_delta, rounding, skinny
from ramify.kernels.weights.lora import LoraRows, LoraTable, LoraWeight
from ramify.kernels.weights.quantised import lay_out
from ramify.kernels.weights.routing import ClampedGate
from ramify.kernels.weights.rows import Rows
from ramify.kernels.weights.stack import ExpertMatrices
from tests.kernels.delta_cases import Heads, Layer
from tests.kernels.float8_cases import weight_of
from tests.kernels.kernel_compiler import GENERATIONS, Compiled, compiling, usage

Case = tuple[str, Callable[[], object]]
HEADS = {64: (9, 3), 80: (32, 32), 96: (24, 8), 128: (32, 8), 256: (16, 8)}
"""Query and KV heads by head_dim, as models have them."""
HALF = torch.bfloat16
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def _attention(
    head_dim: int,
    dtype: torch.dtype,
    *,
    page_size: int = 16,
    deterministic: bool = False,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: bool = False,
) -> Callable[[], object]:
    def launch() -> None:
        heads, kv_heads = HEADS[head_dim]
        q = torch.zeros(1, heads, head_dim, dtype=dtype)
        pages = torch.zeros(3, kv_heads, page_size, head_dim, dtype=dtype)
        table = torch.zeros(1, 2, dtype=torch.int32)
        shape = attention.plan_shape(q, pages, window=window, deterministic=deterministic)
        # The forms of cascade differ in one load: those of one head_dim stand for all.
        zeros = torch.zeros(heads) if sinks else None
        options = {"soft_cap": soft_cap, "sinks": zeros, "cascade": head_dim == 128}
        attention.warm_up(shape, q, pages, pages, table, **options)

    return launch


def attention_cases() -> Iterator[Case]:
    for head_dim, dtype in [*((each, HALF) for each in HEADS), (128, torch.float16), (128, torch.float32)]:
        yield f"{NAMES[dtype]} {head_dim}", _attention(head_dim, dtype)
        yield f"{NAMES[dtype]} {head_dim} deterministic", _attention(head_dim, dtype, deterministic=True)
    for page_size in (1, 64, 128):
        yield f"bf16 128 pages of {page_size}", _attention(128, HALF, page_size=page_size)
    yield "bf16 128 window", _attention(128, HALF, window=4096)
    yield "bf16 128 window deterministic", _attention(128, HALF, window=4096, deterministic=True)
    yield "bf16 64 window sinks", _attention(64, HALF, window=128, sinks=True)
    yield "bf16 256 soft cap", _attention(256, HALF, soft_cap=50.0)


def row_cases() -> Iterator[Case]:
    """Kernels that work row by row: norms, activation, rotation and store, copies."""
    for dtype in (HALF, torch.float32):
        for size in (576, 1024, 4096, 5120, 8192):
            x, weight = torch.zeros(8, size, dtype=dtype), torch.ones(size, dtype=dtype)
            case = f"{NAMES[dtype]} {size}"
            yield case, lambda x=x, weight=weight: norm.rms_norm(x, weight, 1e-5)
            yield case, lambda x=x, weight=weight: norm.add_rms_norm(x, x, weight, 1e-5)
        for size in (1536, 3072, 14336, 17408):
            x = torch.zeros(8, 2 * size, dtype=dtype)
            yield f"{NAMES[dtype]} {size}", lambda x=x: activation.silu_mul(x)
        for head_dim in HEADS:
            yield from _store_cases(head_dim, dtype)


def _store_cases(head_dim: int, dtype: torch.dtype) -> Iterator[Case]:
    heads, kv_heads = HEADS[head_dim]
    q, k, v = torch.zeros(8, heads + 2 * kv_heads, head_dim, dtype=dtype).split(
        [heads, kv_heads, kv_heads], dim=1
    )
    weight, slots = torch.ones(head_dim, dtype=dtype), torch.arange(8)
    turn = torch.zeros(8, head_dim // 2, dtype=torch.complex64)
    pages = torch.zeros(4, 3, kv_heads, 16, head_dim, dtype=dtype)
    case, layer = f"{NAMES[dtype]} {head_dim}", pages[0]
    yield case, lambda: kv_store.copy_pages(pages, pages, [0], [1])
    yield case, lambda: rope.rope_store_kv(q, k, v, turn, layer, layer, slots)
    yield (
        f"{case} norms",
        lambda: rope.rope_store_kv(q, k, v, turn, layer, layer, slots, q_norm=weight, k_norm=weight),
    )
    yield f"{case} norm", lambda: norm.rms_norm(q, weight, 1e-5)


def delta_cases() -> Iterator[Case]:
    """Heads of Qwen3.5 27B, and of 0.8B."""
    for dtype in (HALF, torch.float32):
        for heads in (Heads(16, 48, 128, 128), Heads(16, 16, 128, 128)):
            layer = Layer(heads, (3,), dtype)
            case = f"{NAMES[dtype]} {heads.heads} x {heads.value_dim}"
            yield case, lambda layer=layer: layer.step(gated_delta.gated_delta_rule, [(0, 0, 3)], [0])
            x = torch.zeros(4, heads.heads, heads.value_dim, dtype=dtype)
            norm_ = torch.ones(heads.value_dim), 1e-6
            yield case, lambda x=x: gated_delta.output_gate(x, x)
            yield f"{case} norm", lambda x=x, norm_=norm_: gated_delta.output_gate(x, x, norm=norm_)


def product_cases() -> Iterator[Case]:
    for dtype in (HALF, torch.float32):
        for outputs, inputs in ((6144, 4096), (4096, 14336), (1536, 576)):
            weight = torch.zeros(outputs, inputs, dtype=dtype)
            bias, out = torch.zeros(outputs, dtype=dtype), torch.zeros(300, outputs, dtype=dtype)
            x = torch.zeros(300, inputs, dtype=dtype)
            case = f"{NAMES[dtype]} {outputs} x {inputs}"
            for rows in (300, 3):
                yield case, lambda x=x[:rows], weight=weight: matmul.matmul(x, weight)
                yield (
                    f"{case} bias, sum",
                    lambda x=x[:rows], weight=weight, bias=bias, out=out[:rows]: matmul.matmul(
                        x, weight, bias, out=out, add=True
                    ),
                )


def quantised_cases() -> Iterator[Case]:
    """Products with groups as in GGUF files and AWQ, and with float8 and a factor for an output."""
    stored = {"int4": torch.uint8, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
    kinds = ("int4", 32, True), ("int4", 128, False), ("int8", 16, False), ("fp8", 0, False)
    for form, group, offsets in kinds:
        numbers = torch.zeros(6144, 4096, dtype=torch.uint8).view(stored[form])
        factors = torch.ones(6144, 4096 // group if group else 1)
        rows = Rows(numbers, factors.half(), factors if offsets else None, group=group)
        weight = lay_out(rows, inputs=4096, device="cpu")
        x = torch.zeros(300, 4096, dtype=HALF)
        for count in (300, 17, 1):
            case = f"bf16 {form} in groups of {group or 'all'}"
            yield case, lambda x=x[:count], weight=weight: quantised.quantised_matmul(x, weight)


def float8_cases() -> Iterator[Case]:
    """Products of float8 activations and weights, with a factor for an output or for blocks of 128 x 128."""
    for group in (0, 128):
        numbers = torch.zeros(6144, 4096, dtype=torch.uint8).view(torch.float8_e4m3fn)
        factors = torch.ones(6144, 4096 // group if group else 1)
        rows = Rows(numbers, factors, group=group, float8_activations=True)
        weight = lay_out(rows, inputs=4096, device="cpu")
        x = torch.zeros(300, 4096, dtype=HALF)
        for count in (300, 17, 1):
            case = f"float8 in groups of {group or 'all'}"
            yield case, lambda x=x[:count], weight=weight: float8.float8_matmul(x, weight)
        yield (
            f"float8 in groups of {group or 'all'}, deterministic",
            lambda x=x, weight=weight: float8.float8_matmul(x, weight, by_row=True),
        )


def trial_cases(capability: int) -> Iterator[Case]:
    """Kernels that no card has timed, at the sizes of Llama-3.1-8B and Qwen3.5 27B."""
    x, weight = torch.zeros(300, 4096, dtype=HALF), torch.ones(4096, dtype=HALF)
    matrix, double = torch.zeros(6144, 4096, dtype=HALF), torch.zeros(300, 28672, dtype=HALF)
    for rows in (1, 32):
        yield f"trial, {rows} rows", lambda rows=rows: skinny.matmul(x[:rows], matrix)
    layer = Layer(Heads(16, 48, 128, 128), (70,), HALF)
    yield "trial", lambda: layer.step(chunked_delta.gated_delta_rule, [(0, 0, 70)], [0])
    for group in (0, 128) if capability >= 89 else ():
        case, hidden, inner = (
            f"trial, float8 in groups of {group or 'all'}",
            *(weight_of(8, size, group) for size in (4096, 14336)),
        )
        yield case, lambda hidden=hidden: rounding.norm_float8(x, weight, 1e-5, hidden)
        yield case, lambda hidden=hidden: rounding.norm_float8(x, weight, 1e-5, hidden, residual=x)
        yield case, lambda inner=inner: rounding.gate_float8(double, inner)


def expert_cases() -> Iterator[Case]:
    """Mixtures: Qwen3-30B-A3B's experts, and gpt-oss's with biases and their gate."""
    for hidden, size, gpt_oss in ((2048, 768, False), (2880, 2880, True)):
        x, shares = torch.zeros(65, hidden, dtype=HALF), torch.zeros(65, 4)
        chosen = torch.zeros(65, 4, dtype=torch.int32)
        parts = [torch.zeros(8, 2 * size, hidden, dtype=HALF), torch.zeros(8, hidden, size, dtype=HALF)]
        if gpt_oss:
            parts += [torch.zeros(8, 2 * size, dtype=HALF), torch.zeros(8, hidden, dtype=HALF)]
        weights = ExpertMatrices(*parts, clamp=ClampedGate(1.702, 7.0) if gpt_oss else None)
        for rows in (1, 65):
            given = x[:rows], chosen[:rows], shares[:rows], weights
            yield f"bf16 {hidden} x {size} experts", lambda given=given: experts.mixture(*given)


def lora_cases() -> Iterator[Case]:
    for dtype in (HALF, torch.float32):
        table = LoraTable()
        parts = [(start, torch.zeros(16, 4096), torch.zeros(1024, 16), 2.0) for start in (0, 1024)]
        table[3] = LoraWeight.from_parts([(at, a.to(dtype), b.to(dtype), scale) for at, a, b, scale in parts])
        x, out = torch.zeros(4, 4096, dtype=dtype), torch.zeros(4, 2048, dtype=dtype)
        rows = LoraRows(np.array([3, -1, 3, 3]))
        yield NAMES[dtype], lambda x=x, table=table, rows=rows, out=out: lora.lora(x, table, rows, out=out)


def sampling_cases() -> Iterator[Case]:
    for vocab in (49152, 128256, 151936, 262144):
        for dtype in (HALF, torch.float32):
            yield from _sampling_cases(vocab, dtype)


def _sampling_cases(vocab: int, dtype: torch.dtype) -> Iterator[Case]:
    case, rows = f"{NAMES[dtype]} {vocab}", 4
    x = torch.zeros(rows, vocab, dtype=dtype)
    mask = torch.zeros(rows, -(-vocab // 32), dtype=torch.int32)
    listed, tokens = torch.zeros(rows, dtype=torch.int32), torch.zeros(rows, dtype=torch.int64)
    edits = LogitEdits(torch.zeros(2, 7, dtype=torch.int32), torch.zeros(3, 7))
    for name, top_k in (("", 0), (" ordered", 5)):
        options = SamplingOptions.from_columns(
            [1.0] * rows, [top_k] * rows, [1.0] * rows, [0.1] * rows, [0.5] * rows
        )
        yield f"{case}{name}", lambda options=options: sampling.sample_tokens(x, options)
        yield f"{case}{name} masked", lambda options=options: sampling.sample_tokens(x, options, mask, listed)
    yield case, lambda: logits.restore_logits(x, edits, logits.edit_logits(x, edits))
    yield case, lambda: logits.log_probabilities(x, tokens, 0)
    yield f"{case} ranked", lambda: logits.log_probabilities(x, tokens, 5)


def cases(capability: int) -> Iterator[Case]:
    yield from attention_cases()
    yield from row_cases()
    yield from delta_cases()
    yield from product_cases()
    yield from quantised_cases()
    if capability >= 89:  # before, no instruction multiplies float8
        yield from float8_cases()
    yield from trial_cases(capability)
    yield from expert_cases()
    yield from lora_cases()
    yield from sampling_cases()


def label(launch: Compiled) -> str:
    """The part of a form's key that tells the forms of one case apart."""
    if launch.name != "attend":
        return launch.name
    found = launch.kernel.src.constants
    names = launch.kernel.src.fn.arg_names
    values = {names[place]: value for (place, *_), value in found.items()}
    listed = " listed" if values["LISTED"] else ""
    return f"attend {values['BLOCK_M']} x {values['BLOCK_N']}{listed}"


def measure(capability: int, only: str, chosen: Iterable[Case]) -> Iterator[dict[str, Any]]:
    """A row for each form that is compiled for the first time."""
    limit = GENERATIONS[capability].device.shared_bytes
    seen: set[bytes] = set()
    for case, launch in chosen:
        with compiling(capability) as launches:
            try:
                launch()
            except Exception as error:  # the compiler's and its tools' types are their own
                yield {"case": case, "fault": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        for each in launches:
            code = each.kernel.asm["cubin"]
            if only not in each.name or code in seen:
                continue
            seen.add(code)
            taken = usage(each.kernel, capability)
            row = {"kernel": label(each), "case": case, "registers": taken.registers, "spills": taken.spills}
            row |= {"hot_spills": taken.hot_spills, "shared": taken.shared, "warps": taken.warps}
            row |= {"programs": taken.programs, "widths": taken.widths}
            if taken.shared > limit:
                row["fault"] = f"takes {taken.shared} of {limit} bytes of shared memory"
            elif taken.hot_spills:
                row["fault"] = "spills registers where it multiplies"
            yield row


def line(row: dict[str, Any]) -> str:
    if "registers" not in row:
        return f"{row['case']:<32}  FAULT: {row['fault']}"
    narrow = sum(count for size, count in row["widths"].items() if size < 8)
    text = f"{row['kernel']:<24}{row['case']:<32}{row['registers']:>5}"
    text += f"{row['spills']:>7}{row['hot_spills']:>4}"
    text += f"{row['shared']:>9}{row['warps']:>6}{row['programs']:>9}"
    text += f"{row['widths'].get(16, 0):>6}{row['widths'].get(8, 0):>6}{narrow:>6}"
    return text + (f"  FAULT: {row['fault']}" if "fault" in row else "")
