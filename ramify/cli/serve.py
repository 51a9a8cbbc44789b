"""`ramify serve`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ramify.cli.flags import MODEL_HELP, add_config_flags, configured, given_fields
from ramify.errors import NotFound
from ramify.runtime.config import ServerConfig
from ramify.runtime.default_model import tell_of_default_model

if TYPE_CHECKING:
    from ramify.runtime.server.router import Router


class _Models(argparse.Action):
    """An action for the models on the command line: sets `model`, its name, and the further `models`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        namespace.model, *others = values
        if "=" in namespace.model:
            from ramify.runtime.models.names import named

            try:
                name, model = named(namespace.model)
            except ValueError as error:
                raise argparse.ArgumentError(self, str(error)) from None
            if model != namespace.model:
                namespace.model = model
                namespace.served_model_name = [name, *getattr(namespace, "served_model_name", ())]
        if others:
            namespace.models = [*others, *getattr(namespace, "models", ())]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="*",
        action=_Models,
        default=argparse.SUPPRESS,
        help=f"{MODEL_HELP} Of several, each may be NAME=MODEL, and a request's model chooses.",
    )
    add_config_flags(parser, ServerConfig)


def run_command(options: argparse.Namespace) -> int:
    given = with_first_of_folder(given_fields(options, ServerConfig))
    config = configured(ServerConfig, given)
    from ramify.runtime.processes.prestart import PrestartedWorkers

    with PrestartedWorkers(config) as workers:  # started before the imports of this process
        from ramify.runtime.server.app.serve import serve

        return serve(config, _routes, workers, notice=None if "model" in given else tell_of_default_model)


def with_first_of_folder(given: dict[str, Any]) -> dict[str, Any]:
    """The fields `given`; without a model it is the first one of the folder `models_dir`."""
    if "model" in given or "models_dir" not in given:
        return given
    from ramify.runtime.models.names import in_folder

    try:
        inside = in_folder(Path(given["models_dir"]))
    except NotFound:
        return given  # the pool tells it
    return given | {"model": next(iter(inside.values()))} if inside else given


def _routes() -> list[Router]:
    from ramify.batches import route as batches
    from ramify.programs import route as programs

    return [programs.router, batches.router]
