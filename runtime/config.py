"""Configuration: a ladder of frozen dataclasses. Resolving "auto" returns a new one by `replace`."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args, get_origin, get_type_hints

DEFAULT_MODEL = "SmolLM2-135M-Instruct"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What the ring of processes needs to know. Sizes in tokens unless the name says otherwise."""

    model: str = DEFAULT_MODEL
    """A name, a hub id, a local folder, or a `.gguf` file."""
    load_format: Literal["auto", "dummy"] = "auto"
    """dummy: random weights of the model's shape, for benchmarks; config and tokenizer suffice."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 where the device multiplies it natively, else float32."""
    quantization: Literal["auto", "none", "int8", "int4", "gguf"] = "auto"
    """Weights. gguf: as the file holds them. int8, int4: rounded. auto: gguf for a GGUF file, else none; none
    where float32 was asked for."""
    exact_activations: bool = False
    """What a layer multiplies int8 and int4 weights with stays bfloat16. Otherwise the CPU rounds it to int8,
    with a scale for each group of inputs, where that is faster (AVX512_VNNI without AMX)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where torch finds a CUDA device, else cpu."""
    attention_backend: Literal["auto", "cpu", "torch", "triton"] = "auto"
    """cpu: compiled kernels that read pages in place. triton: kernels for NVIDIA GPUs. torch: the reference
    twins, slow. auto: cpu or triton, by the device."""
    cascade: bool | None = None
    """Attention reads what requests share once for all of them, where that pays. None does so wherever it can
    be done: by the cpu and triton backends."""
    cuda_graphs: bool | None = None
    """Replay decoding steps as CUDA graphs; None does so on a CUDA device."""
    overlap: bool | None = None
    """Overlap scheduling: the next pass is launched while the host works on the last tokens. None: on a CUDA
    device."""
    speculation: bool | None = None
    """Speculative decoding: draft tokens are looked up in equal prompts, the request itself and recent
    outputs, and verified in the next step, where that pays. None: on the CPU."""
    deterministic: bool = False
    """The bits of an output do not depend on what runs beside it, on chunks, or on what was cached."""
    cache: Literal["radix", "naive"] = "radix"
    """naive: the same interface without sharing, for baselines."""
    page_size: int = 16
    kv_memory_gb: float | None = None
    """Memory for KV pages, in GiB; ignored when `num_pages` is given. None takes on the CPU what 20,480
    tokens or two of the model's longest contexts need, at most 1, and on a CUDA device what
    `memory_fraction` leaves."""
    num_pages: int | None = None
    memory_fraction: float | None = None
    """The share of a CUDA device's memory that weights, workspace and KV pages may take together; None takes
    0.9."""
    context_length: int | None = None
    """At most the model's own; None takes the model's own."""
    max_running: int = 128
    """Requests in one batch."""
    chunk_tokens: int = 512
    """Prompt tokens computed in one step, over all requests."""
    max_waiting: int = 2048
    """Requests queued before the frontend answers 429."""
    policy: Literal["program", "prefix", "fcfs"] = "prefix"
    """program: what has waited long for how little it still needs goes first, by program. prefix: longest
    cached prefix first, and ages with waiting time. fcfs: by arrival."""
    threads: int | None = None
    """Compute threads of the scheduler; None takes the cores that this process may use."""
    jump_forward: bool = True
    """Text that a grammar forces is appended as the tokenizer spells it, without the model choosing its
    tokens one by one (which may split words in ways that the model has not seen in training)."""
    grammar_timeout_s: float = 5.0
    """How much processor time a constraint may take to compile before its requests are refused."""
    grammar_memory_gb: float = 1.0
    """How much memory a constraint may take to compile."""
    seed: int = 0
    """Seeds requests that bring no seed of their own."""
    log_level: str = "warning"
    check_pages: bool = False
    """Check the page equation after every step (tests)."""

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            if get_origin(kind) is Literal and getattr(self, name) not in get_args(kind):
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(get_args(kind))}."
                )
        for name in ("context_length", "threads"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1.")
        for name in ("page_size", "max_running", "chunk_tokens", "max_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.num_pages is not None and self.num_pages < 2:
            raise ValueError(f"num_pages is {self.num_pages}; it must be at least 2.")
        if self.kv_memory_gb is not None and self.kv_memory_gb <= 0:
            raise ValueError(f"kv_memory_gb is {self.kv_memory_gb}; it must be above 0.")
        if self.memory_fraction is not None and not 0 < self.memory_fraction <= 1:
            raise ValueError(f"memory_fraction is {self.memory_fraction}; it must be above 0 and at most 1.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig(EngineConfig):
    """What `ramify serve` adds."""

    host: str = "127.0.0.1"
    port: int = 30000
    api_key: str | None = None
    served_model_name: str | None = None
    live_texts: bool = True
    """The page at / shows ends of prompts and beginnings of outputs; without, the server keeps neither."""
    drain_s: float = 30.0
    """How long SIGTERM waits for running requests."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.port < 65536:
            raise ValueError(f"port is {self.port}; it must be between 0 and 65535.")
