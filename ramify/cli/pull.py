"""`ramify pull`: the files of a model, and the compiled kernels, so that the first run waits for neither."""

from __future__ import annotations

import argparse
import threading

from ramify.cli.flags import MODEL_HELP
from ramify.runtime.config import DEFAULT_MODEL


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", default=DEFAULT_MODEL, help=f"{MODEL_HELP} (default: %(default)s)"
    )


def run(options: argparse.Namespace) -> int:
    from ramify.runtime.model.hub.resolve import resolve

    compiling = threading.Thread(target=_compile, daemon=True)
    compiling.start()
    weights = resolve(options.model).weights
    compiling.join()
    print(weights)
    return 0


def _compile() -> None:
    from ramify.runtime.compile_ahead import compile_grammars, compile_kernels
    from ramify.runtime.config import EngineConfig
    from ramify.runtime.executor.device import resolve_device

    if resolve_device(EngineConfig()).type == "cpu":
        compile_kernels()
    compile_grammars()
