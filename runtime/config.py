"""Configuration as frozen dataclasses: the engine's, and the server's, which extends it.

The docstring of a field is its help on the command line.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ramify.kernels.trials import Trial
from ramify.logs import LEVELS, LogFormat
from ramify.runtime.host_names import host_name, is_loopback, is_origin, split_names, tcp_host
from ramify.runtime.lora_names import checked_name
from ramify.runtime.rope_fields import NEEDED, ROPE_FIELDS, ROPE_TYPES, wrong_field
from ramify.spelling import nearest

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
COLD_GB = 10.0
"""Value of `cold_gb` if it is None."""

ELSEWHERE = {
    "model_path": "model",
    "tokenizer_path": "The tokenizer is the model's own.",
    "tokenizer": "The tokenizer is the model's own.",
    "trust_remote_code": "No code of a checkpoint is run.",
    "max_model_len": "context_length",
    "n_predict": "max_output_tokens",
    "mem_fraction_static": "memory_fraction",
    "gpu_memory_utilization": "memory_fraction",
    "max_total_tokens": "num_pages",
    "max_mamba_cache_size": "num_states",
    "mamba_full_memory_ratio": "state_memory_gb",
    "max_running_requests": "max_running",
    "max_num_seqs": "max_running",
    "max_queued_requests": "max_waiting",
    "max_num_queued_reqs": "max_waiting",
    "chunked_prefill_size": "chunk_tokens",
    "max_prefill_tokens": "chunk_tokens",
    "max_num_batched_tokens": "chunk_tokens",
    "block_size": "page_size",
    "schedule_policy": "policy",
    "enable_priority_scheduling": "Priorities are always on: give requests a priority.",
    "scheduling_policy": "Priorities are always on: give requests a priority. Here higher goes first.",
    "schedule_low_priority_values_first": "Here higher priorities go first, as is SGLang's default.",
    "random_seed": "seed",
    "enable_deterministic_inference": "deterministic",
    "disable_overlap_schedule": "Here it is overlap=False (--no-overlap).",
    "no_async_scheduling": "Here it is overlap=False (--no-overlap).",
    "disable_cuda_graph": "Here it is cuda_graphs=False (--no-cuda-graphs).",
    "enforce_eager": "Here it is cuda_graphs=False (--no-cuda-graphs).",
    "enable_prefix_caching": "Prefixes are always shared.",
    "disable_radix_cache": "Here it is prefix_cache='naive' (--prefix-cache naive).",
    "no_enable_prefix_caching": "Here it is prefix_cache='naive' (--prefix-cache naive).",
    "swap_space": "host_kv_gb",
    "enable_lora": "Adapters need no switch: name them with --lora name=path, or give --lora-loading.",
    "lora_modules": "Here it is loras={name: path} (--lora name=path).",
    "lora_paths": "Here it is loras={name: path} (--lora name=path).",
    "max_loras": "Up to 256 adapters can be loaded, all of them in one batch.",
    "max_lora_rank": "Adapters may have any rank.",
    "guided_decoding_backend": "grammar_backend",
    "enable_auto_tool_choice": "Tools can always be called, if the model's template has them.",
    "disable_log_requests": "Requests that succeed are not logged.",
    "speculative_algorithm": "speculation",
    "speculative_draft_model_path": "draft_model",
    "speculative_model": "draft_model",
    "speculative_num_draft_tokens": "The number of draft tokens follows from measured times.",
    "num_speculative_tokens": "The number of draft tokens follows from measured times.",
    "tp": "tensor_parallel",
    "tp_size": "tensor_parallel",
    "tensor_parallel_size": "tensor_parallel",
    "pp_size": "A model is divided within its layers: tensor_parallel (--tensor-parallel N).",
    "pipeline_parallel_size": "A model is divided within its layers: tensor_parallel (--tensor-parallel N).",
    "dp": "replicas",
    "dp_size": "replicas",
    "data_parallel_size": "replicas",
    "kv_events_config": "Here it is kv_events='tcp://HOST:PORT' (--kv-events), with kv_events_replay and"
    " kv_events_topic.",
    "chat_template": "The chat template is the model's own.",
    "tool_call_parser": "The format of tool calls is read from the chat template.",
    "hf_overrides": "For its rope_parameters or rope_scaling there is rope_scaling (--rope-scaling).",
    "json_model_override_args": "For its rope_scaling there is rope_scaling (--rope-scaling).",
    "models_max": "Memory decides how many models are loaded: models_memory_gb.",
    "reasoning_parser": "The marks of reasoning are read from the chat template.",
}
"""Option of SGLang or vLLM → our option, or a remedy."""
VALUES_ELSEWHERE = {"lpm": "prefix", "guidance": "llguidance", "fp8_e4m3": "fp8"}
"""Value of an option of SGLang or vLLM → our value."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of the runtime. Sizes are in tokens unless the name of the option says otherwise."""

    model: str = DEFAULT_MODEL
    """A name, a hub id, a local folder, or a `.gguf` file."""
    model_impl: Literal["auto", "native", "transformers"] = "auto"
    """The implementation that runs the model. native: Ramify's own. transformers: the library's, with
    Ramify's attention on KV pages. auto: native if it has the model's family, else transformers."""
    load_format: Literal["auto", "dummy"] = "auto"
    """auto: load the model's weights. dummy: random weights of the model's shape, for benchmarks; only its
    config and tokenizer are needed."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the computation. auto: bfloat16, but float32 on GPUs without bfloat16 instructions. On
    CPUs without such instructions auto is float32 for the torch attention backend and for models that run by
    transformers' code."""
    quantization: Literal["auto", "none", "int8", "int4", "gguf"] = "auto"
    """Format of the weights. none: not quantised. int8, int4: quantised to this format. gguf: as in the GGUF
    file. auto: the format of the file if the file is quantised, unless dtype is float32 or the torch
    attention backend is used; else none."""
    exact_activations: bool = False
    """Activations keep their dtype in products with quantised weights. Without this flag they are rounded
    unless dtype is float32. The CPU rounds them to int8 for int8 and int4 weights, with a scale for each
    group of inputs, and rounds attention weights (after the softmax) to bfloat16, each only if the processor
    is faster with it. GPUs of compute capability 8.9 and later round activations to float8, for FP8
    checkpoints made for that."""
    packed_cache_gb: float = 20.0
    """Disk space for packed copies of weights, in GiB, for all models together. A later start maps such a
    copy instead of packing the weights again. The least recently used copies are removed. 0: no copy is kept.
    `ramify cache` lists them."""
    loras: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """A LoRA adapter to load at start, as name=path of a PEFT folder. Requests use it by this name. The flag
    may be repeated."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if torch finds a CUDA device, else cpu."""
    attention_backend: Literal["auto", "cpu", "torch", "triton", "flashinfer"] = "auto"
    """cpu: compiled kernels that read pages in place. triton: kernels for NVIDIA GPUs. flashinfer: attention
    by FlashInfer, without CUDA graphs; needs ramify-llm[flashinfer]. torch: the reference kernels, slow.
    auto: cpu on the CPU, triton on a CUDA device."""
    trial: Sequence[Trial] = ()
    """A kernel of the triton and flashinfer backends that no card has timed yet, off by default; the flag may
    be repeated. fused-rounding: norms and activations round to float8 themselves, for FP8 checkpoints.
    chunked-delta: prompts of models with linear attention layers in chunks of 32 tokens. skinny-products: own
    products of at most 32 rows. dependent-launch: small kernels are launched before their predecessor's end.
    library-prompts: cuDNN's attention for prompts without a cached prefix."""
    cascade: bool | None = None
    """Cascade attention: a prefix that several requests share is read once for all of them, if that is
    faster. None: on with the cpu and triton backends."""
    cuda_graphs: bool | None = None
    """Replay decoding steps as CUDA graphs. None: on with a CUDA device."""
    overlap: bool | None = None
    """Overlap scheduling: launch the next step while the host still works on the last one. None: on with a
    CUDA device. With speculation, each step drafts tokens or is launched ahead, whichever is faster by
    measurement."""
    speculation: bool | None = None
    """Speculative decoding by prompt lookup: draft tokens are copied from equal prompts, from the request
    itself or from recent outputs, and verified in the next step, if that is faster. None: on with the CPU,
    and with a draft model."""
    draft_model: str | None = None
    """A smaller model with the same tokenizer, or an EAGLE-3 head for the model, named as `model` is. It
    proposes draft tokens if prompt lookup finds no draft tokens that are likelier to be accepted, and if
    drafting pays by measurement. Unset: with speculation, the head for multi-token prediction in the model's
    checkpoint, if there is one."""
    deterministic: bool | None = None
    """Outputs are equal bit for bit, whatever other requests run in the batch, however prefill is chunked,
    and whatever is cached. None: on with the cpu backend, with two exceptions: bfloat16 on processors with
    AMX, where prefill would be slower, and models that run by transformers' code."""
    prefix_cache: Literal["radix", "naive"] = "radix"
    """radix: requests share the KV pages of common prefixes. naive: no sharing, as a baseline."""
    page_size: int | None = None
    """Tokens of a KV page. None: 16 on the CPU, 64 on a CUDA device."""
    kv_memory_gb: float | None = None
    """Memory for KV pages, in GiB; ignored if `num_pages` is given. None, on the CPU: enough for 20,480
    tokens or two contexts, whichever is more, as far as free memory goes; more than 1 GiB is returned to the
    system 5 to 10 minutes after its last use, or when the machine's memory is short. None, on a CUDA device:
    the memory that `memory_fraction` leaves."""
    max_pinned_share: float = 0.5
    """Share of the KV pages that pins may hold together (`rm.pin`), from 0 to 1. A pin above it is refused.
    Pins give way to a request that runs alone and does not fit beside them."""
    kv_cache_dtype: Literal["auto", "fp8", "int8"] = "auto"
    """Number format of KV pages. auto: the model's dtype. fp8: float8 (e4m3) with a scale of 1, which fits
    twice the tokens into the same memory; it needs the torch backend, or the triton backend on a GPU of
    compute capability 8.9 or later. int8, on the CPU: int8 with a float32 scale for each token and KV head,
    which fits 1.9 times the tokens into the same memory."""
    num_pages: int | None = None
    """Number of KV pages. None: as many as `kv_memory_gb` holds."""
    memory_fraction: float | None = None
    """The share of a CUDA device's memory for weights, workspace, KV pages and states together. None: 0.9."""
    cold_dir: str | None = None
    """A folder in which KV pages outlive memory and the process: prompts that were computed before a restart
    are read where that is faster than computing them. Its files hold prompts. Several servers and replicas
    may share a folder. None: no such files."""
    cold_gb: float | None = None
    """Disk space in GiB for all files in `cold_dir`. The least recently used files are removed. None: 10."""
    host_kv_gb: float | None = None
    """Memory of the host in GiB for KV pages that have left a CUDA device's memory. It is searched before
    `cold_dir`."""
    state_memory_gb: float | None = None
    """Memory for the states of a model with linear attention layers, in GiB; ignored if `num_states` is
    given. None: as much as for KV pages, and at least 2 states. On the CPU, at least `max_running` states, or
    as many as fit into 1 GiB."""
    num_states: int | None = None
    """Number of slots for states. Each running request takes one. The others hold cached states from which
    later requests continue."""
    context_length: int | None = None
    """Tokens of prompt and output together. None: the model's own context, but with longrope (Phi-3,
    Phi-4-mini) its original context: in a longer context every request gets the long factors. A context
    longer than the model's own is accepted with a warning, if the model can compute it."""
    rope_scaling: Mapping[str, Any] | None = None
    """A rope_scaling as in config.json, which extends the context. It replaces the model's own; an example is
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}. For yarn and linear the
    context becomes the factor times the original context."""
    max_output_tokens: int | None = None
    """Maximum number of output tokens of a request, reasoning included. It cuts the default max_tokens of
    endpoints and of `gen`, and the max_tokens of chats, as the room in the context does. Elsewhere a larger
    max_tokens is refused. None: as many as fit into the context."""
    max_running: int | None = None
    """Maximum number of requests in one batch. None: 128 on the CPU; on a CUDA device 256, or 512 from 32 GiB
    of memory on, or 1,024 from 64 GiB on."""
    chunk_tokens: int | None = None
    """Maximum number of prompt tokens computed in one step, over all requests. None: 512 on the CPU; on a
    CUDA device 8,192, or 2,048 if the device has less than 32 GiB."""
    itl_target_ms: float | None = None
    """Target for the inter-token latency, in milliseconds. A step that also decodes takes only as many prompt
    tokens as can be computed within this time, by measurement: at least 16, and at most `chunk_tokens`. None:
    always up to `chunk_tokens`."""
    max_waiting: int = 2048
    """Maximum number of queued requests; further requests are answered with 429."""
    policy: Literal["program", "prefix", "fcfs"] = "program"
    """Order of admission among requests of one priority. program: by program, the highest ratio of waiting
    time to remaining work first. prefix: longest cached prefix first; waiting time counts as cached tokens.
    fcfs: by arrival."""
    threads: int | None = None
    """Number of compute threads of the scheduler. None: the number of cores that this process may use."""
    jump_forward: bool = True
    """Jump-forward decoding: text that a grammar forces is appended in the tokens into which the tokenizer
    splits it. Otherwise the model samples each of these tokens, and may split words in ways that it has not
    seen in training."""
    grammar_backend: Literal["auto", "ramify", "xgrammar", "llguidance", "outlines"] = "auto"
    """The library that compiles constraints. auto: Ramify's own. A schema that Ramify refuses goes to
    outlines-core, if outlines-core enforces all of it. Grammars in Lark's notation go to llguidance."""
    grammar_timeout_s: float = 5.0
    """Limit of processor time for compiling a constraint, in seconds. Beyond it the request is refused."""
    grammar_memory_gb: float = 1.0
    """Limit of memory for compiling a constraint, in GiB."""
    special_tokens_in_messages: bool = True
    """Spellings of the model's special tokens in the texts of chat messages, such as <|im_start|>, become
    these tokens, as with other servers. Off: such spellings in messages, tool results and tools stay text."""
    schemas: str | None = None
    """A folder of JSON schemas (*.json), read once at start. A $ref in a schema of a request may point to one
    of them: by its $id, by its path in the folder, or by a URI whose host and path equal the schema's path in
    the folder. Nothing is ever fetched."""
    calibration: str | None = None
    """A file that `ramify calibrate` has written: temperatures for the probabilities of decisions. Refused if
    it was fitted to another model or to another version of a layout. None: those of the model's folder, if
    it has any."""
    replicas: int = 1
    """Number of replicas: copies of the model, each in processes of its own with its own KV pages. num_pages,
    kv_memory_gb, max_running and `threads` are per replica. On the CPU replicas divide the cores; on CUDA
    each has a GPU. A replica that dies is restarted, and its requests continue on other replicas. On one CPU
    machine two replicas are usually slower than one."""
    kv_events: str | None = None
    """An address, tcp://HOST:PORT, at which routers can subscribe to what enters and leaves the prefix trees,
    in vLLM's format. Events contain the token ids of prompts, and subscribing needs no key. So a HOST that
    other machines can reach, such as *, needs `ramify serve --insecure`."""
    kv_events_replay: str | None = None
    """An address, tcp://HOST:PORT, at which subscribers can get events that they have missed."""
    kv_events_topic: str | None = None
    """The topic of the events. None: kv@HOSTNAME@MODEL, with the model's name in requests."""
    tensor_parallel: int = 1
    """Tensor parallelism: the number of processes that the heads and matrices of the model are divided among.
    On CUDA each process has a GPU; on the CPU they divide the cores, which is slower than one process.
    kv_memory_gb, memory_fraction and `threads` are per process."""
    prefill_replicas: int = 0
    """Number of prefill replicas, which only compute prompts; it must be less than `replicas`. The other
    replicas take over the pages and generate, so that long prompts do not delay their steps. This does not
    increase the throughput."""
    seed: int = 0
    """Seed of the generator that draws a seed for each request without one."""
    log_level: str = "warning"
    """Least level of the messages that are logged: debug, info, warning, error or critical."""
    log_format: LogFormat = "text"
    """json: each message is one line of JSON on standard error, from all processes. From the level info on
    there is one for each request, with its ids, tokens and times as fields."""
    check_pages: bool = False
    """After every step, check that the numbers of free, evictable, leased and in-use pages add up to all
    pages (for tests)."""

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            if get_origin(kind) is Literal and getattr(self, name) not in get_args(kind):
                remedy = nearest(str(getattr(self, name)), get_args(kind), VALUES_ELSEWHERE) or ""
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(get_args(kind))}."
                    f" {remedy}".rstrip()
                )
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and math.isnan(value):
                raise ValueError(f"{field.name} is nan; it must be a number.")
        if self.log_level.lower() not in LEVELS:
            remedy = nearest(self.log_level, LEVELS) or ""
            raise ValueError(
                f"log_level is {self.log_level!r}; it must be one of {', '.join(LEVELS)}. {remedy}".rstrip()
            )
        named = (self.trial,) if isinstance(self.trial, str) else tuple(self.trial)
        if unknown := [name for name in named if name not in get_args(Trial)]:
            remedy = nearest(unknown[0], get_args(Trial)) or ""
            raise ValueError(
                f"trial is {unknown[0]!r}; it must be one of {', '.join(get_args(Trial))}. {remedy}".rstrip()
            )
        object.__setattr__(self, "trial", tuple(dict.fromkeys(named)))
        sizes = ("context_length", "threads", "page_size", "max_running", "chunk_tokens", "max_waiting")
        ones = dict.fromkeys((*sizes, "max_output_tokens", "replicas", "tensor_parallel"), 1)
        for name, least in [*ones.items(), ("num_pages", 2), ("num_states", 2)]:
            if (value := getattr(self, name)) is not None and value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}.")
        if not 0 <= self.prefill_replicas < self.replicas:
            raise ValueError(
                f"prefill_replicas is {self.prefill_replicas} of {self.replicas} replicas; at least one must"
                " be left that generates."
            )
        if self.prefill_replicas and self.tensor_parallel > 1:
            raise ValueError(
                f"prefill_replicas is {self.prefill_replicas} and tensor_parallel {self.tensor_parallel}:"
                " pages that are divided among ranks are not moved."
            )
        if self.prefill_replicas and self.prefix_cache == "naive":
            raise ValueError("prefill_replicas is set and prefix_cache is 'naive', which shares no pages.")
        if self.draft_model is not None and self.speculation is False:
            raise ValueError("draft_model is set and speculation is off: nothing would use the draft model.")
        self._check_kv_events()
        for name in ("cold_dir", "host_kv_gb"):
            if getattr(self, name) is None:
                continue
            if self.prefix_cache == "naive":
                raise ValueError(f"{name} is set and prefix_cache is 'naive', which shares no pages.")
            if self.tensor_parallel > 1:
                raise ValueError(
                    f"{name} is set and tensor_parallel is {self.tensor_parallel}: pages that are divided"
                    f" among ranks are not kept. Leave out {name}."
                )
        gibs = ("kv_memory_gb", "state_memory_gb", "host_kv_gb", "cold_gb", "grammar_memory_gb")
        for name in (*gibs, "itl_target_ms", "grammar_timeout_s"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; it must be above 0 and finite.")
        if self.cold_gb is not None and self.cold_dir is None:
            raise ValueError(f"cold_gb is {self.cold_gb:g} and cold_dir is not set: there would be no files.")
        if self.packed_cache_gb < 0:
            raise ValueError(f"packed_cache_gb is {self.packed_cache_gb}; it must be at least 0.")
        self._check_rope_scaling()
        several = getattr(self, "models", ()) or getattr(self, "models_dir", None)
        for name in self.loras:
            checked_name(name.rpartition(":")[2] if several else name, "loras")
        if not 0 <= self.max_pinned_share <= 1:
            raise ValueError(f"max_pinned_share is {self.max_pinned_share}; it must be from 0 to 1.")
        if self.memory_fraction is not None and not 0 < self.memory_fraction <= 1:
            raise ValueError(f"memory_fraction is {self.memory_fraction}; it must be above 0 and at most 1.")

    def _check_rope_scaling(self) -> None:
        if self.rope_scaling is None:
            return
        scaling = dict(self.rope_scaling)
        kind = scaling.get("rope_type", scaling.get("type"))
        if kind not in ROPE_TYPES:
            found = f"its rope_type is {kind!r}" if kind else "it has no rope_type"
            raise ValueError(
                f"rope_scaling is {scaling}, and {found}; it must be one of {', '.join(ROPE_TYPES)}."
                + (" dynamic changes nothing up to the model's own context." if kind == "dynamic" else "")
            )
        unknown = [name for name in scaling if name not in ROPE_FIELDS]
        if unknown:
            remedy = nearest(unknown[0], ROPE_FIELDS) or f"It may have {', '.join(ROPE_FIELDS)}."
            raise ValueError(f"rope_scaling has no field {unknown[0]!r}. {remedy}")
        if (wrong := wrong_field(scaling)) is not None:
            name, values = wrong
            raise ValueError(f"rope_scaling.{name} is {scaling[name]!r:.80}; it must be {values}.")
        missing = [name for name in NEEDED.get(kind, ()) if scaling.get(name) is None]
        if missing:
            raise ValueError(f"rope_scaling of the rope_type {kind} has no {' and no '.join(missing)}.")

    def _check_kv_events(self) -> None:
        if self.kv_events is None:
            for name in ("kv_events_replay", "kv_events_topic"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} is set and kv_events is not: there would be no events.")
            return
        if self.prefix_cache == "naive":
            raise ValueError("kv_events is set and prefix_cache is 'naive': there would be no events.")
        for name in ("kv_events", "kv_events_replay"):
            if (address := getattr(self, name)) is None:
                continue
            host = tcp_host(address)
            if host is None:
                raise ValueError(
                    f"{name} is {address!r}; it must be tcp://HOST:PORT, such as tcp://127.0.0.1:5557."
                )
            if not (is_loopback(host) or getattr(self, "insecure", False)):
                raise ValueError(
                    f"{name} is {address!r}, which other machines can reach, and there is no key for it:"
                    " whoever connects gets prompts as token ids. Serve with --insecure if that is meant; an"
                    " api_key protects everything else as before."
                )

    def most_requests(self, max_running: int) -> int:
        """Maximum number of requests in flight: a batch of `max_running` for each replica, and the queue."""
        return self.replicas * max_running + self.max_waiting

    def most_of_a_flow(self, max_running: int) -> int:
        """Maximum number of requests in flight of one flow (a body or a program): seven eighths of
        `most_requests`, so that some are left for other flows."""
        most = self.most_requests(max_running)
        return most - most // 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig(EngineConfig):
    """Options that `ramify serve` adds."""

    host: str = "127.0.0.1"
    """The address to listen on. An address that other machines can reach needs `api_key` or `insecure`."""
    port: int = 30000
    """The port to listen on. 0: any that is free; it is printed."""
    api_key: str | None = None
    """Key that requests must send as a bearer token or in x-api-key, but for /livez, /readyz and /health."""
    api_key_file: str | None = None
    """A file with the api_key, which then stands neither on the command line nor in the environment. White
    space around the key is left out."""
    keys: str | None = None
    """File of API keys (TOML), each with its limits, models, endpoints and cache scope, beside or in place of
    api_key. `ramify keys new` makes keys; SIGHUP reads the file again."""
    open_metrics: bool = False
    """/metrics needs no api_key, so that gateways can read it without one."""
    insecure: bool = False
    """Listen without an api_key on an address that other machines can reach, or publish kv_events at one."""
    allowed_hosts: str = ""
    """Comma-separated host names that requests may name in addition to loopback names and `host`. With an
    api_key only the listed names are allowed, or every name if none is listed. *.example.com means all names
    below example.com, * any name."""
    cors: str = ""
    """Comma-separated origins of web pages that may use the server, such as https://app.example.com; * means
    any page."""
    served_model_name: Sequence[str] = ()
    """Name of the model for clients, in place of its own. Repeated, requests may use each of the names; the
    first is the model's id."""
    sampling_defaults: Literal["model", "none"] = "model"
    """Values of temperature, top_p, top_k, min_p and repetition_penalty for requests that leave them out, on
    the APIs of other servers but SGLang's. model: those that the model's files recommend. none: those of the
    API."""
    lora_loading: bool = False
    """Requests may load and unload LoRA adapters. Anyone who may send requests can then have any folder of
    this machine read as an adapter."""
    log_texts: bool = False
    """The prompt and the output of each request are logged: in its line with log_format json, and in its span
    with `otel`. Otherwise no text of a prompt or an output is logged."""
    otel: bool = False
    """Send a span of each request by OTLP over HTTP, as OpenTelemetry's variables OTEL_* say; needs
    ramify-llm[otel]. The header traceparent makes it a child of the client's span."""
    live_texts: bool = True
    """Show the ends of prompts and the beginnings of outputs in the dashboard at /. Off: neither is
    stored."""
    incremental_streaming_output: bool = False
    """Each event of a /generate stream has only the new text, ids and output log-probabilities, as with
    SGLang's flag of this name. Otherwise each event has the whole output so far."""
    models: Sequence[str] = ()
    """Further models, each a MODEL or NAME=MODEL. A request's `model` chooses. A model is loaded at its first
    use; all of them have the options of the engine that are given here."""
    models_dir: str | None = None
    """A folder of further models: its .gguf files and model folders, by their names."""
    keep_alive: str | None = None
    """How long a model stays loaded after its last request: seconds, or a duration such as 5m; 0 unloads it
    at once, -1 never. None: never. A model is unloaded earlier if another one needs its memory."""
    pin: Sequence[str] = ()
    """Name of a model that is loaded at the start and stays loaded. The flag may be repeated."""
    models_memory_gb: float | None = None
    """Memory for all loaded models together, in GiB: weights, KV pages, and a workspace for each. None: what
    is free when a model is loaded."""
    strict_fields: bool = False
    """Refuse fields of OpenAI's API that have no effect here. Otherwise each is named once in the log, and
    the response header x-ramify-ignored names the ignored fields of its request."""
    store: bool = True
    """Keep responses of /v1/responses and conversations in memory, so that requests can continue them by
    `previous_response_id` and `conversation`. The least recently used are dropped."""
    max_lease_s: float = 86_400.0
    """Most seconds for which a request may lease its pages after its end: leased pages are evicted after
    others, pinned ones not at all. 0 allows no leases."""
    batch_dir: str | None = None
    """Folder for batch files (/v1/files, /v1/batches): their prompts and answers. Only one server at a time
    uses it. None: the folder batches/PORT in Ramify's home."""
    batch_gb: float = 10.0
    """Disk space in GiB above which no further batch file is taken. 0: there are no batch files."""
    drain_s: float = 30.0
    """Seconds that running requests have to finish after SIGTERM."""

    @property
    def needs_key(self) -> bool:
        """Whether requests need an API key."""
        return self.api_key is not None or self.keys is not None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.port < 65536:
            raise ValueError(f"port is {self.port}; it must be between 0 and 65535.")
        names = self.served_model_name
        names = (names,) if isinstance(names, str) else tuple(names)
        if len(set(names)) < len(names) or not all(names):
            given = ", ".join(map(repr, names))
            raise ValueError(f"served_model_name is {given}; names differ and are not empty.")
        object.__setattr__(self, "served_model_name", names)
        self._check_models()
        for name in ("max_lease_s", "batch_gb", "drain_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name):g}; it must be 0 or more.")
        if self.log_texts and self.log_format != "json" and not self.otel:
            raise ValueError(
                "log_texts is set, and nothing would have the texts: give log_format json, or otel."
            )
        if self.api_key_file is not None:
            object.__setattr__(self, "api_key", self._key_of_file(self.api_key_file))
            object.__setattr__(self, "api_key_file", None)  # a copy on another machine does not read it
        if self.api_key is not None and not self.api_key.strip():
            raise ValueError("api_key is empty.")
        for origin in split_names(self.cors):
            if origin != "*" and not is_origin(origin):
                raise ValueError(
                    f"cors names {origin!r}; an origin is scheme://host or scheme://host:port, with no path."
                )
        for host in split_names(self.allowed_hosts):
            if host != "*" and host_name(host.removeprefix("*.")) is None:
                raise ValueError(f"allowed_hosts names {host!r}, which is no host name.")
        if not (self.needs_key or self.insecure or is_loopback(self.host)):
            raise ValueError(
                f"host is {self.host!r}, which other machines can reach, and there is no api_key. Give one"
                " (--api-key, --keys), or let everybody who reaches the server use it (--insecure)."
            )

    def _key_of_file(self, path: str) -> str:
        try:
            with open(path, encoding="utf-8") as file:
                key = file.read().strip()
        except (OSError, ValueError) as error:
            raise ValueError(f"api_key_file {path!r} cannot be read: {error}.") from None
        if self.api_key is not None:
            raise ValueError("api_key_file is given, and so is another api_key; give one.")
        if not key:
            raise ValueError(f"api_key_file {path!r} is empty.")
        return key

    @property
    def keeps_alive(self) -> bool:
        """Whether models are loaded when they are used and may be unloaded; else there is one, always
        loaded."""
        return any(getattr(self, name) not in (None, ()) for name in SEVERAL_MODELS)

    def _check_models(self) -> None:
        for name in ("models", "pin"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        if self.models_memory_gb is not None and not 0 < self.models_memory_gb < math.inf:
            raise ValueError(f"models_memory_gb is {self.models_memory_gb}; it must be above 0 and finite.")
        if self.keeps_alive and self.replicas > 1:
            raise ValueError(
                f"replicas is {self.replicas} and models are loaded and unloaded: replicas divide the whole"
                " machine. Serve the model alone, without keep_alive."
            )
        if self.models or self.models_dir:
            check_several(self)


def check_several(config: EngineConfig) -> None:
    """Raise ValueError for an option that several models cannot share."""
    for name, why in ONE_MODEL.items():
        if getattr(config, name) != getattr(type(config), name):
            raise ValueError(f"{name} is {getattr(config, name)!r} and there are several models: {why}")


SEVERAL_MODELS = ("models", "models_dir", "keep_alive", "pin", "models_memory_gb")
"""Options of a server that loads and unloads models."""
ONE_MODEL = {
    "draft_model": "a draft model has the tokenizer of one of them. Serve the model alone.",
    "calibration": "a calibration is of one model. Put it into the model's folder.",
    "kv_events": "events name no model. Serve the model alone.",
    "replicas": "replicas divide the whole machine. Serve the model alone.",
    "rope_scaling": "it replaces that of every model. Put it into the model's config.json.",
}
"""Option that several models refuse → the reason and the remedy."""
