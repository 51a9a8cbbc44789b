"""The target of `run`, `chat` and `calibrate`: an engine of the command, or a server."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ramify.cli.flags import add_config_flags, configured, given_fields
from ramify.credentials import KEY_VARIABLE
from ramify.errors import BackendError, InvalidRequest
from ramify.runtime.config import EngineConfig

if TYPE_CHECKING:
    from ramify.lang.backends.endpoint import RuntimeEndpoint
    from ramify.runtime.engine.engine import Engine


async def first_model(base_url: str, api_key: str | None, remedy: str | None = None) -> str:
    """The id of the first model that an OpenAI-compatible endpoint lists.

    `remedy`: the remedy in the error for an endpoint without models.
    """
    from ramify.lang.backends.http import HttpClient

    client = HttpClient(base_url, api_key)
    try:
        found: str = (await client.get("/models"))["data"][0]["id"]
    except (LookupError, TypeError):
        raise BackendError(f"{client.base_url} lists no model.", remedy=remedy) from None
    finally:
        await client.aclose()
    return found


def add_key_flag(parser: argparse.ArgumentParser, flag: str = "--endpoint-key") -> None:
    """Add the flag for the API key of a server, to be read by `endpoint_key`."""
    text = f"The API key of that server. Default: the variable {KEY_VARIABLE}, which other users cannot read."
    parser.add_argument(flag, metavar="KEY", help=text)


def add_target_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a running server, and the flags of an engine with one model or several."""
    parser.add_argument(
        "--endpoint",
        "--url",
        metavar="URL",
        help="Use a running server, such as http://127.0.0.1:30000, instead of starting an engine.",
    )
    add_key_flag(parser)
    parser.add_argument(
        "--endpoint-model", metavar="NAME", help="The model of that server. (default: its first)"
    )
    parser.add_argument(
        "--models",
        action="append",
        metavar="NAME=MODEL",
        help="One of several models in place of --model, for gen(model=NAME). Repeatable; the first one runs "
        "the steps that name none.",
    )
    add_config_flags(parser, EngineConfig, heading="engine that is started without --endpoint: {}")


def engine_of(options: argparse.Namespace) -> Engine | None:
    """The engine that the flags describe, not started yet; None if --endpoint was given."""
    given: dict[str, Any] = given_fields(options, EngineConfig)
    if options.endpoint is not None:
        flags = [place for place in options.sources.values() if place.startswith("--")]
        flags += ["--models"] if options.models else []
        if flags:
            flag = flags[0]
            raise InvalidRequest(f"{flag} describes an engine, but --endpoint has its own.", field=flag)
        return None
    for flag in ("endpoint_key", "endpoint_model"):
        if getattr(options, flag) is not None:
            flag = "--" + flag.replace("_", "-")
            raise InvalidRequest(f"{flag} needs --endpoint.", field=flag)
    from ramify.runtime.engine.engine import Engine
    from ramify.runtime.models.names import by_name

    if options.models:
        given["models"] = configured(by_name, {"texts": options.models})
    return configured(Engine, given)


@contextlib.contextmanager
def target(options: argparse.Namespace, **endpoint: Any) -> Iterator[Engine | RuntimeEndpoint]:
    """The engine that the flags describe, which starts with the first request, or the server that --endpoint
    names.

    `endpoint`: options of `RuntimeEndpoint`.
    """
    engine = engine_of(options)
    if engine is not None:
        with contextlib.closing(engine):
            yield engine
        return
    from ramify.lang.backends.endpoint import RuntimeEndpoint

    name, key = options.endpoint_model or "", options.endpoint_key
    backend = RuntimeEndpoint(options.endpoint, api_key=key, model=name, **endpoint)
    with contextlib.closing(backend):
        yield backend
