"""/api/tags, /api/show, /api/ps and /api/version of Ollama's API, and the endpoints that manage models there.

Adapters are models, too. Fields whose values are not known are left out.
"""

from __future__ import annotations

import asyncio
import functools
import json
import time
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ramify import __version__
from ramify.errors import NotFound, RamifyError, UnsupportedField
from ramify.messages import Pooling
from ramify.runtime.inspect.checkpoint import stored_tensors, whole_matrices
from ramify.runtime.inspect.resolve import resolve
from ramify.runtime.model.gguf.header import read_header
from ramify.runtime.model.tokenizer.thinking_format import SWITCHES
from ramify.runtime.server.body import peek_body
from ramify.runtime.server.fields import Fields, decode, json_response
from ramify.runtime.server.models import ServedModel, served_models, several_models
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


@router.get("/api/version", any_key=True)
async def version(_: Request) -> Response:
    return json_response({"version": API_VERSION, "ramify": __version__})


@router.get("/api/tags", any_key=True)
async def tags(request: Request) -> Response:
    served = await served_models(request)
    return json_response({"models": [entry for one in served for entry in await _entries(one)]})


@router.get("/api/ps", any_key=True)
async def running(request: Request) -> Response:
    """The models in memory. `expires_at` is there only for a model that will be unloaded."""
    models: list[Body] = []
    for one in await served_models(request):
        if one.service is None:
            continue
        info, status = one.service.frontend.info, one.status
        more: Body = {"size_vram": 0} if info.device == "cpu" else {}
        if status is not None and status.expires_in_s is not None:
            more["expires_at"] = timestamp(time.time_ns() + int(status.expires_in_s * 1e9))
        for entry in await _entries(one):
            entry.pop("size", None)  # on Ollama that in memory
            if status is not None and status.resident is not None:
                more["size"] = status.resident
            models.append(entry | more | {"context_length": info.context_length})
    return json_response({"models": models})


@router.post("/api/show", uses_model=False, any_key=True)
async def show(request: Request) -> Response:
    if (models := several_models(request)) is not None:
        wanted = decode(await peek_body(request), _Named, "")
        found = await models.find(wanted.model or wanted.name)
        if found.service is None:
            return json_response(await _show_unloaded(found))
        await models.acquire(request)
    lora, headers = await parse_body(request, tables.SHOW, _parse_show)
    service = Service.serving(request)
    info = service.frontend.info
    stored = await _stored(info.path)
    entry = _entry(ServedModel(None, service), stored, lora or service.model_name, lora)
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


class _Named(msgspec.Struct):
    model: str = ""
    name: str = ""


async def _show_unloaded(served: ServedModel) -> Body:
    """The part of the answer that the files of a model tell. Clients ask about each model of a list, so none
    is loaded for it."""
    stored = await _stored(served.path)
    entry = _entry(served, stored, served.identity)
    known: Body = {} if stored is None else stored.metadata
    family = known.get("general.architecture") or "general"
    if served.context_length is not None:
        known = known | {f"{family}.context_length": served.context_length}
    chats = ["tools"] if stored is not None and stored.chats else []
    shown = {name: value for name, value in entry.items() if name in ("details", "modified_at")}
    return {
        "modelfile": f"FROM {served.path}\n",
        **shown,
        "model_info": known,
        "capabilities": ["completion", *chats],
    }


def _parse_show(service: Service, fields: Fields) -> str:
    _, lora = take_model(service, fields, old=True)
    fields.finish(tables.SHOW.whole)
    return lora


@router.post("/api/pull", uses_model=False)
async def pull(request: Request) -> Response:
    """A served model is here already. Another one is refused."""
    if (models := several_models(request)) is not None:
        wanted = decode(await peek_body(request), _Named, "")
        await models.find_allowed(wanted.model or wanted.name)
        return Response(line({"status": "success"}), media_type="application/x-ndjson")
    _, headers = await parse_body(request, tables.PULL, _parse_pull)
    return Response(line({"status": "success"}), headers=headers, media_type="application/x-ndjson")


def _parse_pull(service: Service, fields: Fields) -> None:
    try:
        take_model(service, fields, old=True)
    except NotFound:
        raise _no_change("/api/pull") from None
    fields.take("stream", bool)
    fields.finish(tables.PULL.whole)


@router.post("/api/create", uses_model=False)
@router.post("/api/copy", uses_model=False)
@router.post("/api/push", uses_model=False)
@router.delete("/api/delete")
@router.post("/api/blobs/{digest}", uses_model=False)
@router.get("/api/blobs/{digest}")
async def manage(request: Request, **_: str) -> Response:
    raise _no_change(request.url.path)


def _no_change(path: str) -> UnsupportedField:
    return UnsupportedField(
        f"{path} is not supported: this server fetches, makes and removes no models.",
        field="model",
        remedy="Fetch another one with `ramify pull MODEL`, and serve it with `ramify serve MODEL`.",
    )


async def _entries(served: ServedModel) -> list[Body]:
    """A model under each of its names, and its adapters."""
    stored = await _stored(served.path)
    return [_entry(served, stored, name, lora) for name, lora in served.names.items()]


def _entry(served: ServedModel, stored: StoredModel | None, name: str, lora: str = "") -> Body:
    """A model, or with `lora` this adapter of it, under `name`."""
    service = served.service
    details: Body = {"parent_model": served.identity if lora else ""}
    entry: Body = {"name": name, "model": name, "details": details}
    if service is not None and lora:
        entry["digest"] = service.frontend.loras.loaded[lora].revision
    elif service is not None and service.frontend.info.fingerprint:
        entry["digest"] = service.frontend.info.fingerprint
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
    chats: bool
    """Whether the files have a chat template."""


async def _stored(model: str) -> StoredModel | None:
    """Facts about a model, by its path or name; None if its files cannot be read here."""
    return await asyncio.to_thread(_read_stored, model)


@functools.lru_cache(maxsize=256)
def _read_stored(model: str) -> StoredModel | None:
    weights = Path(model)
    try:
        if not weights.exists():
            weights = resolve(model, download=False).weights
        tensors, modified = stored_tensors(weights), weights.stat().st_mtime_ns
        if weights.is_dir():
            config: dict[str, Any] = json.loads((weights / "config.json").read_text(encoding="utf-8"))
            if scheme := config.get("quantization_config"):
                tensors = whole_matrices(tensors, scheme)
            metadata: Body = {"general.architecture": config.get("model_type")}
            settings = weights / "tokenizer_config.json"
            chats = (weights / "chat_template.jinja").is_file() or (
                settings.is_file() and '"chat_template"' in settings.read_text(encoding="utf-8")
            )
        else:
            header = read_header(weights).metadata
            chats = "tokenizer.chat_template" in header
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
        chats=chats,
    )


def _short(count: int) -> str:
    """134515008 as "134.52M"."""
    for power, unit in ((9, "B"), (6, "M"), (3, "K")):
        if count >= 10**power:
            return f"{count / 10**power:.4g}{unit}"
    return str(count)
