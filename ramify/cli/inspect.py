"""`ramify inspect`: describes a model, its memory and the options that would be refused.

The weights are not loaded.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING

from ramify.cli.flags import add_config_flags, add_model, configured, given_fields
from ramify.errors import RamifyError
from ramify.runtime.config import EngineConfig

if TYPE_CHECKING:
    from ramify.runtime.inspect.report import Inspection

UNFIT = 1
"""Exit status if the model would not run with these options."""
_OPTIONS = (
    *("model", "device", "dtype", "quantization", "model_impl"),
    *("context_length", "rope_scaling", "kv_memory_gb", "max_running", "chunk_tokens", "page_size"),
    "kv_cache_dtype",
    *("draft_model", "loras", "tensor_parallel"),
)
"""Fields of `EngineConfig` on which the reported memory and refusals depend."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="The memory of another machine, such as 24GB. (default: that of this machine)",
    )
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    add_config_flags(parser.add_argument_group("as in `ramify serve`"), EngineConfig, _OPTIONS)


def run_command(options: argparse.Namespace) -> int:
    from ramify.runtime.inspect.machine import bytes_of, this_machine
    from ramify.runtime.inspect.report import inspected
    from ramify.runtime.inspect.resolve import files_to_inspect

    config = configured(EngineConfig, given_fields(options, EngineConfig))
    machine = this_machine(config.device)
    if options.memory is not None:
        machine = dataclasses.replace(machine, memory=bytes_of(options.memory), free=None)
    try:
        files, whole = files_to_inspect(config.model)
        draft = None if config.draft_model is None else files_to_inspect(config.draft_model)[0]
        found = inspected(files, machine, config, draft=draft)
    except RamifyError as error:
        if error.field != "model":
            raise
        print(f"ramify: {error}", file=sys.stderr)
        return UNFIT
    if options.json:
        print(found.to_json())
    else:
        print("\n".join(f"{name:<14}{text}".rstrip() for name, text in report_lines(found, whole)))
    return 0 if found.fits else UNFIT


def report_lines(found: Inspection, whole: bool) -> list[tuple[str, str]]:
    """(heading, text) of each line of the report.

    A line with an empty heading continues the line before it.
    """
    by = {"native": "Ramify's own code", "transformers": "the code in transformers", None: "none"}
    place = found.path if whole else "on the hub (its headers alone were fetched)"
    active = (
        f", {_count(found.active_parameters)} active" if found.active_parameters < found.parameters else ""
    )
    rows = [
        ("model", f"{found.model}, {place}"),
        ("family", f"{found.family}, by {by[found.implementation]}"),
        ("parameters", f"{_count(found.parameters)}{active}"),
    ]
    for index, form in enumerate(found.formats):
        kept = form.kept_as or found.dtype
        text = (
            f"{form.format} {form.share:.1%} of {form.tensors} tensors, kept as {kept}, {form.bits:.3g} bits"
        )
        rows.append(("" if index else "formats", text))
    memory = "in memory" if found.ranks == 1 else f"in the memory of the first of {found.ranks} ranks"
    rows.append(("weights", f"{_gib(found.file_bytes)} on disk, {_gib(found.weight_bytes)} {memory}"))
    if found.divides_by[1:]:
        counts = " or ".join(map(str, found.divides_by[1:]))
        rows.append(("ranks", f"--tensor-parallel can be {counts}: these divide the model"))
    if found.implementation is not None:
        rows += _kv_lines(found)
    if found.chat is None:
        rows.append(("chat", "no chat template"))
    else:
        thinking = f"thoughts after {found.chat.thinking}" if found.chat.thinking else "no thinking"
        rows.append(("chat", f"tools in the format {found.chat.tools}, {thinking}"))
    but = ", none of experts" if found.active_parameters < found.parameters else ""
    rows.append(
        ("LoRA", f"adapters can be loaded{but}" if found.lora else "no adapters: the code is not ours")
    )
    headed = {"not native": found.not_native, "refused": found.refused, "options": found.refused_options}
    for heading, refusals in headed.items():
        said = "would be refused: " if heading == "options" else ""
        rows += [
            ("" if index else heading, f"{said}{refusal.subject}: {refusal.reason}")
            for index, refusal in enumerate(refusals)
        ]
    rows += [("" if index else "notes", note) for index, note in enumerate(found.notes)]
    return rows


def _kv_lines(found: Inspection) -> list[tuple[str, str]]:
    where = "the CPU" if found.device == "cpu" else "the CUDA device"
    rows = [("context", f"{found.context_length:,} tokens")]
    rows.append(("KV", f"{found.kv_bytes_per_token:,} bytes a token, in {found.kv_dtype}"))
    if found.state_bytes:
        rows.append(("states", f"{_gib(found.state_bytes)} a sequence"))

    def tokens(count: int) -> str:
        return f"{count:,} tokens, {count / found.context_length:.1f} full contexts"

    rows.append(("steps", f"{found.max_running:,} requests, {found.chunk_tokens:,} prompt tokens"))
    if found.device == "cpu":
        rows.append(("pages", f"of {found.page_size}. {found.kv_text}"))
    rows.append(
        (
            "memory",
            f"{_gib(found.memory)} on {where}: beside the weights at most {tokens(found.kv_tokens_at_most)}",
        )
    )
    return rows


def _count(numbers: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6)):
        if numbers >= size:
            return f"{numbers / size:.3g}{unit}"
    return f"{numbers:,}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 1 << 30 else f"{size / 2**20:.1f} MiB"
