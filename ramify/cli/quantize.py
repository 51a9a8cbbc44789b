"""`ramify quantize`: writes a copy of a model with quantised weights, and reports the loss of quality."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ramify.cli.flags import MODEL_HELP
from ramify.cli.signals import told_on_interrupt
from ramify.errors import EngineError, InvalidRequest

if TYPE_CHECKING:
    from ramify.runtime.model.checkpoint import ModelFiles
    from ramify.runtime.quantize.errors import Report

FORMATS = ("int8", "int4", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "f16", "bf16", "f32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument(
        "out", help="The result: a new .gguf file, or from a folder of safetensors also a new folder."
    )
    parser.add_argument(
        "--to",
        choices=FORMATS,
        default="int8",
        help="Format of the weights. For a result in .gguf: int8 (q8_0), int4 (q4_1) or a type of ggml. For "
        "a folder: int8 or int4. (default: %(default)s)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="Compare predictions with those of the source, which is loaded with 4 bytes a weight.",
    )


def run_command(options: argparse.Namespace) -> int:
    from ramify.runtime.inspect.resolve import resolve
    from ramify.runtime.model.loading.load import read_config
    from ramify.runtime.quantize.folder import write_folder
    from ramify.runtime.quantize.gguf_file import write_gguf

    target = Path(options.out).expanduser()
    if target.exists():
        raise InvalidRequest(f"{target} exists.", field="out", remedy="Name a new file or folder.")
    files = resolve(options.model)
    is_file = target.suffix == ".gguf"
    if not files.weights.is_dir() and not is_file:
        raise InvalidRequest(
            f"{options.model} is a GGUF model, and out is {target}.", field="out", remedy="Name a .gguf file."
        )
    if options.check:
        read_config(files.weights)  # raises, before anything is written, if --check is impossible
    target.parent.mkdir(parents=True, exist_ok=True)
    write = write_gguf if is_file else write_folder
    with told_on_interrupt(lambda: f"{target} is not written. To begin anew: {options.command_line}"):
        report = write(files.weights, target, options.to)
    _print(report, target)
    if options.check:
        try:
            with told_on_interrupt(lambda: f"{target} is written, but was not compared with its source."):
                _check(files, resolve(str(target)))
        except Exception as error:
            shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
            raise EngineError(
                f"The check of {target} failed, and {target.name} is removed: "
                f"{str(error).rstrip('.') or type(error).__name__}.",
                field="--check",
                remedy="Without --check the model is written and not compared.",
            ) from error
    return 0


def _check(source: ModelFiles, result: ModelFiles) -> None:
    from ramify.runtime.quantize.quality import measured

    exact, found = measured(source, result)
    print(
        f"perplexity {exact:.3f} -> {found.perplexity:.3f}, KL divergence "
        f"{1e3 * found.divergence:.2f} mnat, same most likely token {found.same:.1%}, "
        f"of {found.tokens:,} tokens"
    )


def _print(report: Report, target: Path) -> None:
    print(f"{'':<28}{'format':>8}{'tensors':>9}{'MiB':>10}{'error':>9}")
    for name, entry in report.classes.items():
        size = f"{entry.after / 2**20:.1f}"
        print(f"{name:<28}{entry.format:>8}{entry.tensors:>9}{size:>10}{entry.relative_error:>9.2%}")
    print(f"{target}: {report.before / 2**20:.1f} MiB -> {report.after / 2**20:.1f} MiB")
    if report.fused:
        names = ", ".join(report.fused)
        print(
            f"Not quantised: {names}, experts stored as one tensor, {report.fused_share:.0%} of the weights"
        )
    sys.stdout.flush()
