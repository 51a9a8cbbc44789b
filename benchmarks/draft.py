"""A draft model beside prompt lookup: output tokens a second with it and without, two engines in turns.

    python -m benchmarks.draft [--kind cut padded random] [--at-once 1] [--temperature 0] [--rounds 4]

There is no small model of the default model's tokenizer, so pairs are made of the default model itself:

cut : its first 6 layers draft for it. They are cheap, and seldom agree with it.
random : as cut, with random weights: what a draft model costs that is always wrong.
padded : it drafts for itself with 60 layers more, whose output is zero. It is always right and a third as
    deep, so this is the most that a draft model of a third of the time can give.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import tempfile
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFWriter

import ramify as rm
from benchmarks.speculation import KINDS as WORK
from benchmarks.speculation import REQUESTS, tokens_per_second
from ramify import cache
from ramify.runtime.config import DEFAULT_MODEL
from ramify.runtime.inspect.resolve import resolve
from ramify.runtime.model.checkpoint import ModelFiles

LAYERS = 6
LAYERS_OF_IT = 30
MORE_LAYERS = 60
KINDS = ("cut", "padded", "random")


def with_layers(source: ModelFiles, folder: Path, layers: int, *, at_random: bool = False) -> str:
    """The GGUF model `source` with `layers` layers: its first ones, then such whose output is zero.

    at_random : the rows of its matrices are shuffled
    """
    folder.mkdir()
    for path in source.tokenizer.glob("*.j*"):
        shutil.copy(path, folder)
    reader = GGUFReader(source.weights)
    writer = GGUFWriter(folder / "model.gguf", "llama")
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            value = layers if field.name == "llama.block_count" else field.contents()
            writer.add_key_value(field.name, value, field.types[0], field.types[-1])
    first = int(reader.fields["llama.block_count"].contents())
    generator = np.random.default_rng(0)
    for tensor in reader.tensors:
        data = tensor.data
        if at_random and data.ndim > 1:
            data = data[generator.permutation(len(data))]
        if not tensor.name.startswith("blk."):
            writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
            continue
        _, number, part = tensor.name.split(".", 2)
        for layer in range(int(number), layers, first):
            silent = layer >= first and part in ("attn_output.weight", "ffn_down.weight")
            to = np.zeros_like(data) if silent else data
            writer.add_tensor(f"blk.{layer}.{part}", to, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(folder)


def pair(kind: str, folder: Path) -> tuple[str, str]:
    """The model and the draft model of `kind`."""
    source = resolve(DEFAULT_MODEL)
    if kind == "padded":
        return with_layers(source, folder / kind, LAYERS_OF_IT + MORE_LAYERS), DEFAULT_MODEL
    return DEFAULT_MODEL, with_layers(source, folder / kind, LAYERS, at_random=kind == "random")


def compare(kind: str, model: str, draft: str, options: argparse.Namespace) -> None:
    with rm.Engine(model) as without, rm.Engine(model, draft_model=draft) as with_:
        for name in options.only:
            rates: dict[rm.Engine, list[float]] = {without: [], with_: []}
            before = with_.stats()
            for number in range(-1, options.rounds):  # the first one warms up, and compiles the grammars
                draw = random.Random(f"{name} {number}")
                asks = [WORK[name](draw) for _ in range(REQUESTS * options.at_once)]
                for engine in (without, with_) if number % 2 else (with_, without):
                    rate = tokens_per_second(engine, asks, options.at_once, options.temperature)
                    if number >= 0:
                        rates[engine].append(rate)
            after = with_.stats()
            off, on = statistics.median(rates[without]), statistics.median(rates[with_])
            ratios = [b / a for a, b in zip(rates[without], rates[with_], strict=True)]
            accepted = after.model_accepted_tokens - before.model_accepted_tokens
            drafted = after.model_draft_tokens - before.model_draft_tokens
            share = (after.draft_model_s - before.draft_model_s) / (after.step_s - before.step_s)
            print(
                f"{kind:6} {name:8} {options.at_once:3} at once: {off:5.0f} tokens/s without, {on:5.0f} with:"
                f" {on / off:.2f}x (rounds {min(ratios):.2f} to {max(ratios):.2f}); {accepted} of {drafted}"
                f" draft tokens accepted, {share:.1%} of the time",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--at-once", type=int, default=1, help="requests at a time")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--only", nargs="+", choices=WORK, default=list(WORK))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        # Packed weights of the pairs go with them; all else is shared with the usual cache.
        home = Path(folder) / "home"
        home.mkdir()
        for entry in cache.home().iterdir():
            if entry.name != "packed":
                (home / entry.name).symlink_to(entry)
        os.environ["RAMIFY_HOME"] = str(home)
        for kind in options.kind:
            compare(kind, *pair(kind, Path(folder)), options)


if __name__ == "__main__":
    main()
