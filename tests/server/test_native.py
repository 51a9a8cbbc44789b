"""SGLang's native API: the calls of SGLang's RuntimeEndpoint, and Ramify's own fields."""

from __future__ import annotations

import json
import re
import urllib.request
from typing import Any

import httpx
import pytest

from ramify.constraint import json_object, json_schema
from ramify.errors import InvalidConstraint
from ramify.messages import Preamble, ProgramHint
from ramify.model_info import ModelInfo
from ramify.runtime.server.sglang import endpoints
from tests.server.conftest import refused
from tests.server.fake_frontend import FakeFrontend, LiveServer, events

SRT_KWARGS = {
    # Options that SGLang's frontend sends with every generation, given or not.
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "max_new_tokens": 8,
    "min_new_tokens": 0,
    "n": 1,
    "stop": [],
    "stop_token_ids": [],
    "stop_regex": [],
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "ignore_eos": False,
    "regex": None,
    "json_schema": None,
}


class SglangEndpoint:
    """The HTTP calls of SGLang's RuntimeEndpoint, with the same urllib calls, headers and assertion."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.model_info = json.loads(self._call("/get_model_info"))

    def _call(self, path: str, body: Any = None, method: str | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json; charset=utf-8"}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as response:
            assert response.status == 200
            return bytes(response.read())

    def flush_cache(self) -> None:
        self._call("/flush_cache", method="POST")

    def get_server_info(self) -> Any:
        return json.loads(self._call("/server_info"))

    def generate(self, body: Any) -> Any:
        return json.loads(self._call("/generate", body))

    def cache_prefix(self, text: str) -> Any:
        return self.generate({"text": text, "sampling_params": {"max_new_tokens": 0}})

    def select(self, text: str, choices: list[str]) -> list[list[Any]]:
        """Send the requests of SGLang's `select`; returns the input token logprobs of each choice."""
        prompt_tokens = self.cache_prefix(text)["meta_info"]["prompt_tokens"]
        answers = self.generate(
            {
                "text": [text + choice for choice in choices],
                "sampling_params": {"max_new_tokens": 0, "temperature": 0},
                "return_logprob": True,
                "return_text_in_logprobs": True,
                "logprob_start_len": max(prompt_tokens - 2, 0),
            }
        )
        return [answer["meta_info"]["input_token_logprobs"] for answer in answers]

    def unconditional(self, ids: list[list[int]]) -> list[list[Any]]:
        answers = self.generate(
            {"input_ids": ids, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
        )
        return [answer["meta_info"]["input_token_logprobs"] for answer in answers]


@pytest.fixture
def endpoint(server: LiveServer) -> SglangEndpoint:
    return SglangEndpoint(server.url)


def test_model_and_server_info(endpoint: SglangEndpoint, http: httpx.Client) -> None:
    assert endpoint.model_info["model_path"] == "/models/byte-model"
    assert endpoint.model_info["is_generation"] is True
    assert http.get("/model_info").json() == endpoint.model_info
    info = endpoint.get_server_info()
    assert info["max_prompt_tokens"] == 4000
    of_device = {"max_running": 128, "chunk_tokens": 512, "page_size": 16}
    assert info.items() >= of_device.items()
    assert info["internal_states"][0]["pages_total"] == 64
    assert http.get("/get_server_info").json()["version"] == info["version"]


def test_model_info_carries_ours(endpoint: SglangEndpoint, frontend: FakeFrontend) -> None:
    import msgspec

    assert msgspec.convert(endpoint.model_info["ramify"], ModelInfo) == frontend.info


def test_generate(endpoint: SglangEndpoint) -> None:
    answer = endpoint.generate({"text": "hello world", "sampling_params": SRT_KWARGS})
    assert answer["text"] == "LO WORLD"
    assert bytes(answer["output_ids"]) == b"LO WORLD"
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (11, 8, 0)
    assert {
        "id",
        "num_retractions",
        "forced_tokens",
        "kept_ids",
        "tail",
        "grammar_s",
        "queue_s",
        "total_s",
    } <= meta.keys()
    assert "input_token_logprobs" not in meta


def test_generate_stream_is_cumulative(http: httpx.Client) -> None:
    body = {"text": "hello world", "sampling_params": SRT_KWARGS, "stream": True}
    position, text = 0, ""
    with http.stream("POST", "/generate", json=body) as response:
        *chunks, done = events(response)
    for chunk in chunks:
        text += chunk["text"][position:]
        position = len(chunk["text"])
        assert chunk["meta_info"]["completion_tokens"] == len(chunk["output_ids"])
    assert (text, done) == ("LO WORLD", "[DONE]")
    assert [chunk["meta_info"]["finish_reason"] for chunk in chunks[:-1]] == [None] * 8
    assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "length"


def stream_with_logprobs(url: str) -> list[Any]:
    """The events of a stream, without the final "[DONE]"."""
    body = {
        "text": ["hello wörld", "and you"],
        "sampling_params": SRT_KWARGS,
        "stream": True,
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    with httpx.stream("POST", url + "/generate", json=body) as response:
        return events(response)[:-1]


@pytest.mark.parametrize("incremental", [False, True])
def test_every_event_has_its_lengths(incremental: bool) -> None:
    """The lengths that SGLang's `test_stream_logprobs` asserts, with and without incremental output."""
    with LiveServer(FakeFrontend(), incremental_streaming_output=incremental) as server:
        chunks = stream_with_logprobs(server.url)
    for index, whole in enumerate(("LO W\xd6RL", "AND YOU ")):
        before, text = 0, ""
        for chunk in chunks:
            if chunk["index"] != index:
                continue
            meta = chunk["meta_info"]
            now = meta["completion_tokens"]
            new = now - before if incremental else now
            assert meta["output_token_logprobs_length"] == now
            assert len(meta["output_token_logprobs"]) == len(meta["output_top_logprobs"]) == new
            assert len(chunk["output_ids"]) == new
            text = text + chunk["text"] if incremental else chunk["text"]
            before = now
        assert text == whole
        assert before == 8


def test_stop_string(endpoint: SglangEndpoint) -> None:
    answer = endpoint.generate({"text": "hello world", "sampling_params": SRT_KWARGS | {"stop": "WO"}})
    assert answer["text"] == "LO "
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "WO"}


def test_cache_prefix(endpoint: SglangEndpoint) -> None:
    assert endpoint.cache_prefix("hello world")["output_ids"] == []
    again = endpoint.cache_prefix("hello world")
    assert again["meta_info"]["cached_tokens"] == 10


def test_select(endpoint: SglangEndpoint) -> None:
    scores = endpoint.select("ab", ["cd", "e"])
    assert [[token[1:] for token in tokens] for tokens in scores] == [
        [[97, "a"], [98, "b"], [99, "c"], [100, "d"]],
        [[97, "a"], [98, "b"], [101, "e"]],
    ]
    assert [token[0] for token in scores[1]] == [None, -2.5, -5.5]
    # Further into the text every token has a number, as its greedy and its unconditional method need.
    assert all(token[0] is not None for tokens in endpoint.select("abc", ["d", "e"]) for token in tokens)
    ids = [[token[1] for token in tokens] for tokens in scores]
    unconditional = endpoint.unconditional(ids)
    assert [[token[1] for token in tokens] for tokens in unconditional] == ids
    assert [tokens[0][0] for tokens in unconditional] == [None, None]


def test_choices_are_scored_in_one_request(endpoint: SglangEndpoint) -> None:
    body = {"text": "ab", "choices": {"texts": ["cd", "e"], "unconditional": True}}
    answer = endpoint.generate(body)
    assert answer["output_ids"] == []
    first, second = answer["meta_info"]["choices"]
    assert first["token_logprobs"] == [[-3.5, 99, "c"], [-4.5, 100, "d"]]
    assert first["unconditional_token_logprobs"] == [[None, 99, "c"], [-4.5, 100, "d"]]
    assert second["token_logprobs"] == [[-5.5, 101, "e"]]
    assert second["behind"] is True
    plain = endpoint.generate(body | {"choices": {"texts": ["e"]}})["meta_info"]["choices"]
    assert plain == [{"token_logprobs": [[-5.5, 101, "e"]], "behind": True}]


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"choices": {"texts": []}}, "choices.texts"),
        ({"choices": {"texts": ["a"] * 1025}}, "choices.texts"),
        ({"choices": {"texts": ["a", ""]}}, "choices.texts[1]"),
        ({"choices": {"texts": ["a"], "top": 3}}, "choices"),
        ({"sampling_params": {"max_new_tokens": 4}}, "sampling_params.max_new_tokens"),
        ({"sampling_params": {"n": 2}}, "sampling_params.n"),
        ({"sampling_params": {"regex": "a"}}, "constraint"),
        ({"preambles": [{"end": "</think>"}]}, "preambles"),
        ({"return_logprob": True}, "return_logprob"),
    ],
)
def test_what_choices_exclude_is_refused_by_name(http: httpx.Client, more: Any, field: str) -> None:
    answer = http.post("/generate", json={"text": "ab", "choices": {"texts": ["a"]}} | more)
    assert refused(answer)["param"] == field


def test_output_logprobs_only_unless_asked(endpoint: SglangEndpoint) -> None:
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 2}, "return_logprob": True}
    for start in ({}, {"logprob_start_len": -1}, {"logprob_start_len": None}):
        meta = endpoint.generate(body | start)["meta_info"]
        assert meta["input_token_logprobs"] == []
        assert meta["output_token_logprobs"] == [[-1.5, 65, None], [-2.5, 66, None]]
        assert "output_top_logprobs" not in meta


def test_top_logprobs(endpoint: SglangEndpoint) -> None:
    meta = endpoint.generate(
        {
            "text": "ab",
            "sampling_params": {"max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 2,
            "return_text_in_logprobs": True,
        }
    )["meta_info"]
    best = [[-0.25, 97, "a"], [-0.5, 98, "b"]]
    assert meta["input_top_logprobs"] == [None, best]
    assert meta["output_top_logprobs"] == [best]


def test_batch(endpoint: SglangEndpoint, frontend: FakeFrontend) -> None:
    answers = endpoint.generate(
        {
            "text": ["abc", "xyz"],
            "sampling_params": [{"max_new_tokens": 1}, {"max_new_tokens": 2}],
            "return_logprob": [True, False],
            "rid": ["one", "two"],
        }
    )
    assert [answer["text"] for answer in answers] == ["A", "XY"]
    assert [answer["meta_info"]["id"] for answer in answers] == ["one", "two"]
    assert ["output_token_logprobs" in answer["meta_info"] for answer in answers] == [True, False]


def test_batch_of_one_answers_a_list(endpoint: SglangEndpoint) -> None:
    assert len(endpoint.generate({"text": ["abc"], "sampling_params": {"max_new_tokens": 1}})) == 1


def test_n_answers_a_list(endpoint: SglangEndpoint) -> None:
    options = {"max_new_tokens": 6, "n": 2, "sampling_seed": 5}
    answers = endpoint.generate({"text": "abc", "sampling_params": options, "rid": "mine"})
    assert [answer["text"] for answer in answers] == ["ABC(5)", "ABC(6)"]
    assert [answer["meta_info"]["id"] for answer in answers] == ["mine-0", "mine-1"]


def test_batch_streamed_carries_the_index(http: httpx.Client) -> None:
    body = {"text": ["abc", "xyz"], "sampling_params": {"max_new_tokens": 3}, "stream": True}
    texts = {}
    with http.stream("POST", "/generate", json=body) as response:
        for chunk in events(response)[:-1]:
            texts[chunk["index"]] = chunk["text"]
    assert texts == {0: "ABC", 1: "XYZ"}


def test_put_is_post(http: httpx.Client) -> None:
    assert http.put("/generate", json={"text": "abc", "sampling_params": {"max_new_tokens": 3}}).json()[
        "text"
    ] == ("ABC")


def test_defaults(endpoint: SglangEndpoint, frontend: FakeFrontend) -> None:
    endpoint.generate({"text": "abc"})
    assert frontend.requests[0].sampling.max_tokens == 128
    endpoint.generate({"text": "abc", "sampling_params": {"max_new_tokens": None}})
    assert frontend.requests[1].sampling.max_tokens is None


def test_our_fields(endpoint: SglangEndpoint, frontend: FakeFrontend) -> None:
    answer = endpoint.generate(
        {
            "prompt_segments": ["ab", [99], "d"],
            "sampling_params": {"max_new_tokens": 20},
            "constraint": {"kind": "choices", "source": '["yes", "no"]'},
            "program": {
                "program": "p1",
                "name": "judge",
                "lease_s": 2.5,
                "path": ["fork 1", "gen verdict"],
                "next_use": "join",
                "branch": "1",
                "forks": ["0/3"],
                "ended": ["2"],
                "calls_left": 4,
            },
            "cache_scope": "tenant",
        }
    )
    assert answer["text"] == "yes"
    (request,) = frontend.requests
    assert request.prompt == ("ab", (99,), "d")
    assert request.hint == ProgramHint(
        program="p1",
        name="judge",
        lease_s=2.5,
        path=("fork 1", "gen verdict"),
        next_use="join",
        branch="1",
        forks=("0/3",),
        ended=("2",),
        calls_left=4,
    )
    assert request.scope == "tenant"


def test_the_docstring_names_every_field_of_a_hint() -> None:
    (said,) = re.findall(r"``program`` \{(.*?)\}", endpoints.__doc__ or "", re.DOTALL)
    assert tuple(re.findall(r"\w+", said)) == ProgramHint.__struct_fields__


@pytest.mark.parametrize(
    ("option", "kind"),
    [
        ({"json_schema": '{"type": "integer"}'}, "json_schema"),
        ({"regex": "a+"}, "regex"),
        ({"ebnf": "root ::= 'a'"}, "ebnf"),
        ({"structural_tag": "{}"}, "structural_tag"),
    ],
)
def test_constraints(
    endpoint: SglangEndpoint, frontend: FakeFrontend, option: dict[str, str], kind: str
) -> None:
    endpoint.generate({"text": "abc", "sampling_params": option})
    assert frontend.requests[0].constraint
    assert frontend.requests[0].constraint.kind == kind
    assert frontend.requests[0].constraint.source in option.values()


def test_flush_cache(endpoint: SglangEndpoint, frontend: FakeFrontend, http: httpx.Client) -> None:
    endpoint.cache_prefix("hello")
    endpoint.flush_cache()
    assert endpoint.cache_prefix("hello")["meta_info"]["cached_tokens"] == 0
    assert http.get("/flush_cache").status_code == http.post("/reset_prefix_cache").status_code == 200


def test_await_tools(http: httpx.Client, frontend: FakeFrontend) -> None:
    wait = {"program": "p1", "branch": "b0", "tools": ["search"]}
    assert http.post("/await_tools", json=wait).status_code == 200
    assert frontend.awaited == [("p1", "b0", ("search",))]
    assert http.post("/await_tools", json={"program": "p1"}).json()["error"]["param"] == "tools"


def test_end_program(http: httpx.Client, frontend: FakeFrontend) -> None:
    assert http.post("/end_program", json={"program": "p1"}).status_code == 200
    assert frontend.ended_programs == ["p1"]
    assert http.post("/end_program", json={}).json()["error"]["param"] == "program"


@pytest.mark.parametrize("body", [{"rid": "mine"}, {"abort_all": True}])
def test_abort_request(http: httpx.Client, frontend: FakeFrontend, body: dict[str, Any]) -> None:
    frontend.hold_after = 1
    stream = {"text": "abc", "rid": "mine", "stream": True}
    with http.stream("POST", "/generate", json=stream) as response:
        assert frontend.held.wait(60)
        assert http.post("/abort_request", json=body).json() == {"aborted": 1}
        *_, last, done = events(response)
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert done == "[DONE]"


def test_abort_needs_to_say_what(http: httpx.Client) -> None:
    response = http.post("/abort_request", json={"rid": ""})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "rid")


def test_a_refused_constraint_names_its_field(http: httpx.Client, frontend: FakeFrontend) -> None:
    frontend.fail_first = InvalidConstraint("No.", field="json_schema", pointer="/not", remedy="Yes.")
    for body, param in (
        ({"sampling_params": {"json_schema": "{}"}}, "sampling_params.json_schema"),
        ({"constraint": {"kind": "json_schema", "source": "{}"}}, "constraint.source"),
    ):
        for stream in (False, True):
            response = http.post("/generate", json={"text": "hi", "stream": stream} | body)
            assert response.status_code == 400
            error = response.json()["error"]
            assert (error["param"], error["pointer"], error["remedy"]) == (param, "/not", "Yes.")


def test_definitions_of_a_constraint(http: httpx.Client, frontend: FakeFrontend) -> None:
    schema = '{"type": "integer", "$ref": "n.json"}'
    wanted = {"kind": "json_schema", "source": schema, "definitions": {"n.json": {"type": "integer"}}}
    assert http.post("/generate", json={"text": "hi", "constraint": wanted}).status_code == 200
    assert frontend.requests[-1].constraint == json_schema(schema, definitions=wanted["definitions"])
    for wrong, param in (
        ({"definitions": {"n.json": []}}, "definitions"),
        ({"kind": "regex"}, "definitions"),
        ({"definitions": "/etc"}, "definitions"),
        ({"whitespace": -1}, "whitespace"),
        ({"source": ""}, "source"),
    ):
        answer = http.post("/generate", json={"text": "hi", "constraint": wanted | wrong})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == f"constraint.{param}"
        assert answer.json()["error"]["message"].startswith(f"constraint.{param}")


def test_preambles_and_json_options(http: httpx.Client, frontend: FakeFrontend) -> None:
    wanted = {"kind": "json_object", "whitespace": 2}
    body = {"text": "hi", "constraint": wanted, "preambles": [{"end": "</think>", "max_tokens": 3}]}
    assert http.post("/generate", json=body).status_code == 200
    assert frontend.requests[-1].constraint == json_object(whitespace=2)
    assert frontend.requests[-1].preambles == (Preamble(end="</think>", max_tokens=3),)
    response = http.post("/generate", json=body | {"preambles": [{"start": "<think>"}]})
    assert response.json()["error"]["param"] == "preambles[0]"
