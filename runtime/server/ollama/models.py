"""/api/tags, /api/show, /api/ps and /api/version of Ollama's API, and the endpoints that manage models there.

A server has one model and its LoRA adapters. Fields whose values are not known are left out.
"""

from __future__ import annotations

import asyncio
import functools
import json
from pathlib import Path
from typing import Any, NamedTuple, get_args

from starlette.requests import Request
from starlette.responses import Response

from ramify import __version__
from ramify.errors import NotFound, RamifyError, UnsupportedField
from ramify.messages import Pooling
from ramify.runtime.inspect.checkpoint import stored_tensors, whole_matrices
from ramify.runtime.model.gguf.header import read_header
from ramify.runtime.model.tokenizer.thinking_format import SWITCHES
from ramify.runtime.server.fields import Fields, json_response
from ramify.runtime.server.ollama.options import SPELLING, take_model
from ramify.runtime.server.ollama.writer import line, timestamp
from ramify.runtime.server.openai.bodies import Body
from ramify.runtime.server.parsing import parse_body
from ramify.runtime.server.router import Router
from ramify.runtime.server.service import Service
from ramify.runtime.server.tables import ollama as tables

router = Router()

API_VERSION = "0.12.11"
"""The release of Ollama whose API this is: the first one with log-probabilities. Clients refuse servers of a
release that is too old for them."""

_TOOLS = "{# Tools are written into the system turn, as this template does not read them. #}"
"""A comment in the shown template of a model whose own template reads no tools. LiteLLM offers tools only to
models whose template has the word."""


@router.get("/api/version")
async def version(_: Request) -> Response:
    return json_response({"version": API_VERSION, "ramify": __version__})


@router.get("/api/tags")
async def tags(request: Request) -> Response:
    service = Service.serving(request)
    stored = await _stored(service)
    return json_response({"models": _entries(service, stored)})


@router.get("/api/ps")
async def running(request: Request) -> Response:
    """The models in memory: all of them, without an end."""
    service = Service.serving(request)
    stored, info = await _stored(service), service.frontend.info
    on_cpu = {"size_vram": 0} if info.device == "cpu" else {}
    more = {"context_length": info.context_length, **on_cpu}
    models = [entry | more for entry in _entries(service, stored)]
    for model in models:
        model.pop("size", None)  # on Ollama that in memory, which is not known here
    return json_response({"models": models})


@router.post("/api/show")
async def show(request: Request) -> Response:
    service = Service.serving(request)
    lora, headers = await parse_body(request, tables.SHOW, _parse_show)
    stored, info = await _stored(service), service.frontend.info
    entry = _entry(service, stored, lora or service.model_name, lora)
    body: Body = {"modelfile": f"FROM {info.path}\n", "details": entry["details"]}
    if "modified_at" in entry:
        body["modified_at"] = entry["modified_at"]
    if defaults := service.sampling_defaults:
        named = {ours: theirs for theirs, ours in SPELLING.items()}
        body["parameters"] = "\n".join(f"{named[name]} {value}" for name, value in defaults.items())
    chat_format = info.chat_format
    capabilities = ["completion"]
    if chat_format is not None:
        comment = "" if "tools" in chat_format.source else _TOOLS
        body["template"] = comment + chat_format.source
        capabilities.append("tools")
        if chat_format.thinking is not None or any(name in chat_format.variables for name in SWITCHES):
            capabilities.append("thinking")
    if info.pooling in get_args(Pooling):
        capabilities.append("embedding")
    known: Body = {} if stored is None else stored.metadata
    family = known.get("general.architecture") or "general"
    body["model_info"] = known | {f"{family}.context_length": info.context_length}
    body["capabilities"] = capabilities
    return json_response(body, headers)


def _parse_show(service: Service, fields: Fields) -> str:
    _, lora = take_model(service, fields, old=True)
    fields.finish(tables.SHOW.whole)
    return lora


@router.post("/api/pull")
async def pull(request: Request) -> Response:
    """The served model is here already. Another one is refused."""
    _, headers = await parse_body(request, tables.PULL, _parse_pull)
    return Response(line({"status": "success"}), headers=headers, media_type="application/x-ndjson")


def _parse_pull(service: Service, fields: Fields) -> None:
    try:
        take_model(service, fields, old=True)
    except NotFound:
        raise _one_model(service, "/api/pull") from None
    fields.take("stream", bool)
    fields.finish(tables.PULL.whole)


@router.post("/api/create")
@router.post("/api/copy")
@router.post("/api/push")
@router.delete("/api/delete")
@router.post("/api/blobs/{digest}")
@router.get("/api/blobs/{digest}")
async def manage(request: Request, **_: str) -> Response:
    raise _one_model(Service.serving(request), request.url.path)


def _one_model(service: Service, path: str) -> UnsupportedField:
    return UnsupportedField(
        f"{path} is not supported: this server has one model, {service.model_name!r}.",
        field="model",
        remedy="Fetch another one with `ramify pull MODEL`, and serve it with `ramify serve MODEL`.",
    )


def _entries(service: Service, stored: StoredModel | None) -> list[Body]:
    """The served model under each of its names, and its adapters."""
    return [_entry(service, stored, name, lora) for name, lora in service.all_names.items()]


def _entry(service: Service, stored: StoredModel | None, name: str, lora: str = "") -> Body:
    """The served model, or with `lora` this adapter, under `name`."""
    info = service.frontend.info
    details: Body = {"parent_model": service.model_name if lora else ""}
    entry: Body = {"name": name, "model": name, "details": details}
    if lora:
        entry["digest"] = service.frontend.loras.loaded[lora].revision
    elif info.fingerprint:
        entry["digest"] = info.fingerprint
    if stored is not None:
        details |= {
            "format": stored.format,
            "family": stored.family,
            "families": [stored.family],
            "parameter_size": _short(stored.parameters),
            "quantization_level": stored.quantization,
        }
        entry["modified_at"] = timestamp(stored.modified_ns)
        if not lora:
            entry["size"] = stored.size
    return entry


class StoredModel(NamedTuple):
    """Facts from the headers of a model's files."""

    format: str
    """gguf or safetensors."""
    family: str | None
    parameters: int
    size: int
    """Bytes of all tensors."""
    quantization: str
    """The format of most numbers."""
    modified_ns: int
    metadata: Body
    """Facts under their names in GGUF files."""


async def _stored(service: Service) -> StoredModel | None:
    """Facts about the served model; None if its files cannot be read here."""
    return await asyncio.to_thread(_read_stored, service.frontend.info.path)


@functools.lru_cache(maxsize=4)
def _read_stored(path: str) -> StoredModel | None:
    weights = Path(path)
    try:
        tensors, modified = stored_tensors(weights), weights.stat().st_mtime_ns
        if weights.is_dir():
            config: dict[str, Any] = json.loads((weights / "config.json").read_text(encoding="utf-8"))
            if scheme := config.get("quantization_config"):
                tensors = whole_matrices(tensors, scheme)
            metadata: Body = {"general.architecture": config.get("model_type")}
        else:
            header = read_header(weights).metadata
            metadata = {name: value for name, value in header.items() if not name.startswith("tokenizer.")}
    except (OSError, ValueError, RamifyError):
        return None
    numbers: dict[str, int] = {}
    for tensor in tensors:
        form = tensor.kept[0] if tensor.kept else tensor.format
        numbers[form] = numbers.get(form, 0) + tensor.numbers
    parameters = sum(numbers.values())
    return StoredModel(
        format="safetensors" if weights.is_dir() else "gguf",
        family=metadata.get("general.architecture"),
        parameters=parameters,
        size=sum(tensor.size for tensor in tensors),
        quantization=max(numbers, key=numbers.__getitem__, default=""),
        modified_ns=modified,
        metadata=metadata | {"general.parameter_count": parameters},
    )


def _short(count: int) -> str:
    """134515008 as "134.52M"."""
    for power, unit in ((9, "B"), (6, "M"), (3, "K")):
        if count >= 10**power:
            return f"{count / 10**power:.4g}{unit}"
    return str(count)
