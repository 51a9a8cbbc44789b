"""`ramify pull`: fetches a model's files and compiles the kernels ahead of the first run."""

from __future__ import annotations

import argparse
import re
import sys
import threading
from typing import TYPE_CHECKING

from ramify.cli.flags import add_config_flags, add_model, configured, given_fields
from ramify.cli.signals import told_on_interrupt
from ramify.errors import UnsupportedField
from ramify.runtime.config import EngineConfig

if TYPE_CHECKING:
    from ramify.runtime.model.checkpoint import ModelFiles

FORM_OPTIONS = (
    "load_format",
    "dtype",
    "quantization",
    "exact_activations",
    "deterministic",
    "trial",
    "cascade",
    "page_size",
    "kv_cache_dtype",
    "tensor_parallel",
)
"""Options of an engine that determine which variants of the Triton kernels it needs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_config_flags(parser.add_argument_group("model and processor"), EngineConfig, ("model", "device"))
    parser.add_argument(
        "--tokenizer",
        action="store_true",
        help="Print the folder of the tokenizer instead, for tools that ask for one, and compile nothing.",
    )
    parser.add_argument(
        "--capability",
        type=_capability,
        metavar="X.Y",
        help="Compile for GPUs of this compute capability, such as 9.0. (default: that of the GPU here)",
    )
    group = parser.add_argument_group(
        "for CUDA", "Give those that the engine will have: its kernels are compiled for them."
    )
    add_config_flags(group, EngineConfig, FORM_OPTIONS)


def run_command(options: argparse.Namespace) -> int:
    with told_on_interrupt(lambda: f"What is finished is kept. To go on: {options.command_line}"):
        return _pull(options)


def _pull(options: argparse.Namespace) -> int:
    from ramify.runtime.inspect.resolve import resolve

    config = configured(EngineConfig, given_fields(options, EngineConfig))
    if options.tokenizer:
        print(resolve(config.model).tokenizer)
        return 0
    capability = _wanted_capability(options, config)
    compiling = threading.Thread(target=_compile_numba, args=(capability is None,), daemon=True)
    compiling.start()
    files = resolve(config.model, weights=config.load_format != "dummy")
    failed = 0
    if capability is not None:
        failed = _compile_triton(config, files, capability, asked="device" in options or options.capability)
    compiling.join()
    print(files.weights)
    return int(failed > 0)


def _capability(text: str) -> int:
    """Parse a compute capability as NVIDIA writes it: "9.0" gives 90."""
    if not re.fullmatch(r"\d+\.\d", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no compute capability, such as 9.0 for an H100")
    return int(text.replace(".", ""))


def _wanted_capability(options: argparse.Namespace, config: EngineConfig) -> int | None:
    """The compute capability of the GPU to compile for; None to compile for the CPU.

    Raises `UnsupportedField` if a GPU is asked for while none is present and no capability is given. Raises
    it also if an option for GPUs is given while the device is the CPU.
    """
    given: int | None = options.capability
    if given is not None and config.device != "cpu":
        from ramify.kernels.triton.plan.attention_config import CARDS

        if given not in CARDS:
            known = ", ".join(f"{number / 10} ({card})" for number, (card, _) in CARDS.items())
            raise UnsupportedField(
                f"capability is {given / 10}; kernels are compiled ahead for {known}.",
                field="capability",
                remedy="Choose one of these. An engine on another card compiles them at its start.",
            )
        return given
    import torch

    if config.device != "cpu" and torch.cuda.is_available():
        from ramify.runtime.executor.device import capability_of

        return capability_of(torch.device("cuda"))
    if config.device == "cuda":
        raise UnsupportedField(
            "device is 'cuda', and there is no CUDA device here to ask for its compute capability.",
            field="device",
            remedy="Say it: --capability 9.0 for an H100 or H200, 8.0 for an A100, 8.9 for an L4 or L40S.",
        )
    for name in ("capability", *FORM_OPTIONS):
        by_flag = options.sources.get(name, "--").startswith("--")
        if by_flag and getattr(options, name, None) is not None:
            raise UnsupportedField(
                f"{name} is given, which only kernels for CUDA depend on; the device is the CPU.",
                field=name,
                remedy="Leave it out, or give --device cuda.",
            )
    return None


def _compile_triton(config: EngineConfig, files: ModelFiles, capability: int, *, asked: bool) -> int:
    """Compile the model's Triton kernels; returns the number of kernels that failed to compile.

    asked : whether an option asks for a GPU. If not, it is no error that the kernels cannot be compiled ahead
    """
    import triton

    from ramify.runtime.executor.triton_forms import compile_for_absent_gpu

    try:
        done = compile_for_absent_gpu(config, files, capability)
    except UnsupportedField as error:
        if asked:
            raise
        print(error, file=sys.stderr)
        return 0
    there = done.forms - done.compiled - done.failed
    print(
        f"{done.forms} kernels for compute capability {capability / 10} by triton {triton.__version__}: "
        f"{there} were in {triton.knobs.cache.dir}, {done.compiled} were compiled in {done.seconds:.1f} s"
        + (f", {done.failed} failed" if done.failed else ""),
        file=sys.stderr,
    )
    return done.failed


def _compile_numba(kernels: bool) -> None:
    """Compile the functions that constraints need, and with `kernels` also the CPU kernels."""
    from ramify.runtime.compile_ahead import compile_grammars, compile_kernels

    if kernels:
        compile_kernels()
    compile_grammars()
