"""TypeSafe's System One, ``POST /v1/systemone``: the same decisions in another form.

Source: docs.typesafe.ai and typesafe-sdk 0.7.5. Errors have that API's form (`errors.systemone_body`).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from ramify.errors import NotFound
from ramify.runtime.server.decisions.ask import Asked, answers_of, ask, trained_layout
from ramify.runtime.server.decisions.state import text_state
from ramify.runtime.server.decisions.systemone_questions import (
    NamedQuestion,
    answer_body,
    path_of,
    take_questions,
    take_state,
)
from ramify.runtime.server.errors import SYSTEM_ONE_ID, SYSTEM_ONE_MODELS
from ramify.runtime.server.fields import Fields, json_response
from ramify.runtime.server.openai.request import take_header
from ramify.runtime.server.parsing import parse_body
from ramify.runtime.server.router import Router
from ramify.runtime.server.service import Service
from ramify.runtime.server.tables.systemone import SYSTEM_ONE

router = Router()

_SPELLED = {"prompt": "state", "messages": "state", "chat": "state"}


class _Parsed(NamedTuple):
    asked: Asked
    questions: dict[str, NamedQuestion]
    header: dict[str, Any]


@router.post(SYSTEM_ONE.path, any_key=True)
async def system_one(request: Request) -> Response:
    parsed, headers = await parse_body(request, SYSTEM_ONE, _parse)
    request_id = request.scope["request_id"] = parsed.header["id"]
    found = await answers_of(request, parsed.asked, partial(path_of, parsed.questions))
    bodies = map(answer_body, parsed.questions.values(), found.answers)
    body = {
        "model": parsed.header["model"],
        "answers": dict(zip(parsed.questions, bodies, strict=True)),
        "usage": {
            "input_tokens": found.prompt_tokens,
            "cached_tokens": found.cached_tokens,
            "output_tokens": 0,
        },
    }
    state_ids = found.answers[0].state_ids
    ids = {"prompt_ids": state_ids} if state_ids else {}
    return json_response(body | ids, headers | {SYSTEM_ONE_ID: request_id})


def _parse(service: Service, fields: Fields) -> _Parsed:
    header = _take_header(service, fields)
    text = take_state(fields, trained_layout(service, fields))
    state = text_state(text, header["id"], service.frontend.info.chat_format)
    questions = take_questions(fields)
    states = [(state, [one.question for one in questions.values()])]
    return _Parsed(ask(service, fields, header, states, SYSTEM_ONE, _SPELLED), questions, header)


def _take_header(service: Service, fields: Fields) -> dict[str, Any]:
    """The result of `take_header`. A model of TypeSafe's stands for the served model, which is named then."""
    try:
        return take_header(service, fields, "req_")
    except NotFound:
        if not fields.take("model", str, "").startswith(SYSTEM_ONE_MODELS):
            raise
        return {"id": "req_" + service.frontend.new_rid(), "model": service.model_name}
