"""A server on a scripted model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ramify.runtime.config import DEFAULT_MODEL
from ramify.runtime.inspect.resolve import resolve
from tests.agents import scripted_model
from tests.agents.clients import COMMAND, MODEL, Script
from tests.agents.session import FINAL
from tests.end_to_end.served import Served, serve


@contextlib.contextmanager
def scripted_server(script: Script, folder: Path) -> Iterator[Served]:
    """`ramify serve` on a model that makes one call, or proposes `COMMAND` as text, and then says `FINAL`."""
    model = folder / "model"
    template = scripted_model.template(tools_first=script.tools_first, command="" if script.tool else COMMAND)
    tokenizer = resolve(DEFAULT_MODEL).tokenizer
    scripted_model.write(model, tokenizer, call=script.call, final=FINAL, template=template)
    with serve(str(model), "--served-model-name", MODEL, "--log-level", "info", "--live-texts") as served:
        yield served
