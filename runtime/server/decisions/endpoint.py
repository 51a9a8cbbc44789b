"""OpenAI's ``POST /v1/decisions``.

Fields beyond that API choose the layout and the normalisation. Each answer has the ``option_mass`` and the
layout of its question. Source: openai-python 3.57, ``types/decision.py``.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from ramify.runtime.server.decisions.ask import Answers, Asked, answers_of, ask, trained_layout
from ramify.runtime.server.decisions.questions import NamedQuestion, answer_body, path_of, take_questions
from ramify.runtime.server.decisions.state import take_input
from ramify.runtime.server.fields import Fields, json_response
from ramify.runtime.server.openai.request import take_header
from ramify.runtime.server.parsing import parse_body
from ramify.runtime.server.router import Router
from ramify.runtime.server.service import Service
from ramify.runtime.server.tables.decisions import DECISIONS

router = Router()

_SPELLED = {"prompt": "input", "messages": "input", "chat": "input"}


class _Parsed(NamedTuple):
    asked: Asked
    questions: list[NamedQuestion]
    header: dict[str, Any]


@router.post(DECISIONS.path, any_key=True)
async def decisions(request: Request) -> Response:
    parsed, headers = await parse_body(request, DECISIONS, _parse)
    found = await answers_of(request, parsed.asked, partial(path_of, parsed.questions))
    named = {name: value for name, value in parsed.header.items() if name in ("model", "service_tier")}
    answers = [answer_body(*each) for each in zip(parsed.questions, found.answers, strict=True)]
    state_ids = found.answers[0].state_ids
    ids = {"prompt_ids": state_ids} if state_ids else {}
    return json_response({"answers": answers, "usage": usage_body(found)} | named | ids, headers)


def _parse(service: Service, fields: Fields) -> _Parsed:
    header = take_header(service, fields, "dec_")
    layout = trained_layout(service, fields)
    state = take_input(fields, header["id"], service.frontend.info.chat_format, layout)
    questions = take_questions(fields)
    states = [(state, [one.question for one in questions])]
    return _Parsed(ask(service, fields, header, states, DECISIONS, _SPELLED), questions, header)


def usage_body(found: Answers) -> dict[str, Any]:
    """The usage in OpenAI's form. ``cache_write_tokens`` counts the tokens that were computed."""
    written = found.prompt_tokens - found.cached_tokens
    return {
        "input_tokens": found.prompt_tokens,
        "input_tokens_details": {"cached_tokens": found.cached_tokens, "cache_write_tokens": written},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": found.prompt_tokens,
    }
