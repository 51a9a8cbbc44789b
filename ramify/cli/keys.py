"""`ramify keys`: makes API keys for the file that ``ramify serve --keys`` reads."""

from __future__ import annotations

import argparse
import sys

from ramify.runtime.server.keys.file import new_key


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["new"], help="new: make a key.")
    parser.add_argument("name", help="The key's name: in the file, in metrics and in the log.")


def run_command(options: argparse.Namespace) -> int:
    key, table = new_key(options.name)
    print(f"{key}\n", file=sys.stderr)
    print("The key is above, and is shown this once. Its entry in the file of keys:\n", file=sys.stderr)
    print(table, end="")
    return 0
