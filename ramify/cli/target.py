"""What `run` and `chat` run on: an engine of their own, or a server elsewhere."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ramify.cli.flags import add_config_flags, given_fields
from ramify.errors import InvalidRequest
from ramify.runtime.config import EngineConfig

if TYPE_CHECKING:
    from ramify.runtime.engine import Engine


def add_target_flags(parser: argparse.ArgumentParser) -> None:
    """--endpoint and --endpoint-key, or the flags of an engine."""
    parser.add_argument("--endpoint", metavar="URL", help="a running server, such as http://127.0.0.1:30000")
    parser.add_argument("--endpoint-key", metavar="KEY", help="the API key of that server")
    add_config_flags(parser.add_argument_group("without --endpoint, an engine is started with"), EngineConfig)


def engine_of(options: argparse.Namespace) -> Engine | None:
    """The engine that the flags describe, not started yet; None where --endpoint was given instead."""
    given: dict[str, Any] = given_fields(options, EngineConfig)
    if options.endpoint is not None:
        if given:
            flag = "--" + next(iter(given)).replace("_", "-")
            raise InvalidRequest(f"{flag} describes an engine, but --endpoint has its own.", field=flag)
        return None
    if options.endpoint_key is not None:
        raise InvalidRequest("--endpoint-key needs --endpoint.", field="--endpoint-key")
    from ramify.runtime.engine import Engine

    try:
        return Engine(**given)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
