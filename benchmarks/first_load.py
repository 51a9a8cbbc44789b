"""What the first load of a model takes, and a later one from the cache of packed weights.

    python -m benchmarks.first_load [MODEL ...] [--threads 2] [--repeat 3]

MB/s are megabytes of the checkpoint's files. *packed*: read and packed, without the cache. *and kept*: a
copy is written besides; a thread flushes it to disk afterwards. *mapped*: a later start. The cache is an
empty folder. The files are in the page cache: a slower disk bounds a first load.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import torch

from ramify import cache
from ramify.runtime.config import DEFAULT_MODEL
from ramify.runtime.inspect.resolve import resolve
from ramify.runtime.model.checkpoint import ModelFiles
from ramify.runtime.model.loading.load import load_model, read_shape
from ramify.runtime.model.quantization import resolve_quantization

ROOM = 1 << 40


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models",
        nargs="*",
        default=[DEFAULT_MODEL],
        metavar="MODEL",
        help="a GGUF file, a folder, or a name; the default model if none is given",
    )
    parser.add_argument("--threads", type=int, default=2, help="threads that decode and pack (2)")
    parser.add_argument("--repeat", type=int, default=3, help="loads of each kind; the median is printed (3)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    for name in options.models:
        weights = Path(name) if Path(name).exists() else resolve(name).weights
        files = ModelFiles(name, weights, weights.parent)
        paths = list(weights.glob("*.safetensors")) if weights.is_dir() else [weights]
        megabytes = sum(path.stat().st_size for path in paths) / 1e6
        for path in paths:
            path.read_bytes()
        shape = read_shape(weights)
        quantization = resolve_quantization(
            "auto", weights, exact=False, quantised=getattr(shape, "quantised", None)
        )
        times: dict[str, list[float]] = {"packed": [], "and kept": [], "mapped": []}
        for _ in range(options.repeat):
            with tempfile.TemporaryDirectory() as home, mock.patch.dict(os.environ, RAMIFY_HOME=home):
                for what, room in (("packed", 0), ("and kept", ROOM), ("mapped", ROOM)):
                    began = time.perf_counter()
                    load_model(
                        files,
                        shape=shape,
                        dtype=torch.bfloat16,
                        quantization=quantization,
                        packed=True,
                        deterministic=True,
                        packed_cache=room,
                    )
                    times[what].append(time.perf_counter() - began)
                    cache.finish()
        print(f"{name}: {megabytes:.0f} MB")
        for what, each in times.items():
            middle = statistics.median(each)
            print(f"  {what:<9} {middle:6.2f} s  {megabytes / middle:6.0f} MB/s")


if __name__ == "__main__":
    main()
