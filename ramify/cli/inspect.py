"""`ramify inspect`: what a model is, what it needs and what would be refused, without loading its weights."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from ramify.runtime.config import DEFAULT_MODEL, EngineConfig

if TYPE_CHECKING:
    from ramify.runtime.inspect.report import Inspection

UNFIT = 1
"""Exit status for a model that would not run."""
_CHOICES: dict[str, tuple[str, ...]] = {
    "device": ("auto", "cpu", "cuda"),
    "dtype": ("auto", "float32", "bfloat16"),
}
_CHOICES |= {"quantization": ("auto", "none", "int8", "int4", "gguf")}
_CHOICES |= {"model_impl": ("auto", "native", "transformers")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", default=DEFAULT_MODEL, help="a name, a hub id, a folder, or a .gguf file"
    )
    parser.add_argument("--memory", metavar="SIZE", help="of another machine, such as 24GB")
    parser.add_argument("--json", action="store_true", help="print JSON")
    for name, choices in _CHOICES.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, choices=choices, default="auto", help="as in `ramify serve`")


def run(options: argparse.Namespace) -> int:
    from ramify.runtime.inspect.fit import files_to_inspect
    from ramify.runtime.inspect.machine import bytes_of, this_machine
    from ramify.runtime.inspect.report import inspected

    machine = this_machine(options.device)
    if options.memory is not None:
        machine = dataclasses.replace(machine, memory=bytes_of(options.memory))
    config = EngineConfig(**{name: getattr(options, name) for name in _CHOICES})
    files, whole = files_to_inspect(options.model)
    found = inspected(files, machine, config)
    if options.json:
        print(found.to_json())
    else:
        print("\n".join(f"{name:<14}{text}".rstrip() for name, text in lines(found, whole)))
    return 0 if found.fits else UNFIT


def lines(found: Inspection, whole: bool) -> list[tuple[str, str]]:
    """(heading, text) of each line; an empty heading continues the one before."""
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
    rows.append(("weights", f"{_gib(found.file_bytes)} on disk, {_gib(found.weight_bytes)} in memory"))
    if found.implementation is not None:
        rows += _kv_lines(found)
    if found.chat is None:
        rows.append(("chat", "no chat template"))
    else:
        thinking = f"thoughts after {found.chat.thinking}" if found.chat.thinking else "no thinking"
        rows.append(("chat", f"tools in the format {found.chat.tools}, {thinking}"))
    rows.append(("LoRA", "adapters can be loaded" if found.lora else "no adapters: the code is not ours"))
    headed = {"not native": found.not_native, "refused": found.refused, "options": found.refused_options}
    for heading, refusals in headed.items():
        said = "refused: " if heading == "options" else ""
        rows += [
            ("" if index else heading, f"{said}{refusal.subject}: {refusal.reason}")
            for index, refusal in enumerate(refusals)
        ]
    return rows


def _kv_lines(found: Inspection) -> list[tuple[str, str]]:
    where = "the CPU" if found.device == "cpu" else "the CUDA device"
    rows = [("context", f"{found.context_length:,} tokens")]
    rows.append(("KV", f"{found.kv_bytes_per_token:,} bytes a token, in {found.dtype}"))
    if found.state_bytes:
        rows.append(("states", f"{_gib(found.state_bytes)} a sequence"))

    def tokens(count: int) -> str:
        return f"{count:,} tokens, {count / found.context_length:.1f} full contexts"

    if found.device == "cpu":
        rows.append(("by default", f"pages for {tokens(found.kv_tokens)}"))
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
