"""`ramify pull`."""

from __future__ import annotations

import argparse

from ramify.runtime.config import DEFAULT_MODEL


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="a name (default: %(default)s)")


def run(options: argparse.Namespace) -> int:
    from ramify.runtime.model.hub.resolve import resolve

    print(resolve(options.model).weights)
    return 0
