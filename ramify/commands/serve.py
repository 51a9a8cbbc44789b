"""`ramify serve`."""

from __future__ import annotations

import argparse

from ramify.commands.flags import add_config_flags, given_fields
from ramify.errors import InvalidRequest
from ramify.runtime.config import ServerConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_flags(parser, ServerConfig)


def run(options: argparse.Namespace) -> int:
    try:
        config = ServerConfig(**given_fields(options, ServerConfig))
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
    from ramify.program_route import router
    from ramify.runtime.server.serve import serve

    return serve(config, router)
