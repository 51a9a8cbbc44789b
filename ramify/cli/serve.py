"""`ramify serve`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ramify.cli.flags import add_config_flags, add_model, configured, given_fields
from ramify.runtime.config import ServerConfig
from ramify.runtime.default_model import tell_of_default_model

if TYPE_CHECKING:
    from ramify.runtime.server.router import Router


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_config_flags(parser, ServerConfig)


def run_command(options: argparse.Namespace) -> int:
    given = given_fields(options, ServerConfig)
    config = configured(ServerConfig, given)
    from ramify.runtime.processes.prestart import PrestartedWorkers

    with PrestartedWorkers(config) as workers:  # started before the imports of this process
        from ramify.runtime.server.app.serve import serve

        return serve(config, _routes, workers, notice=None if "model" in given else tell_of_default_model)


def _routes() -> list[Router]:
    from ramify.batches import route as batches
    from ramify.programs import route as programs

    return [programs.router, batches.router]
