"""The page of a trace, in a headless browser."""

from __future__ import annotations

import html
import re
from typing import Literal

import pytest

import ramify as rm
from ramify.html.template import script
from ramify.lang.trace.report import report, report_data
from tests.browser import BROWSER, needs_browser, rendered, words


@rm.function
def judge(s, essay):
    s += rm.system("You grade essays.") + rm.user(essay)
    s += rm.assistant(rm.gen("first", logprobs=1))
    for fork, aspect in zip(s.fork(2), ("clarity", "logic"), strict=True):
        fork += rm.user(f"Judge its {aspect}.") + rm.assistant(rm.gen("verdict"))
        fork.sync()
    s += rm.user("Grade it.") + rm.assistant(rm.select("grade", ["A", "B"]))
    s += rm.user("Pick.") + rm.assistant(rm.gen("pick", schema=Literal["not at all", "very much so"]))


ANSWERS = {"first": "It is <b>fine</b>.", "verdict": "Good.", "grade": "B", "pick": "very much so"}
NASTY = "An essay with </script><script>document.title='broken'</script> & <!-- in it.\n"


@pytest.fixture(scope="module")
def state():
    return judge.run(NASTY, backend=rm.ScriptedBackend(ANSWERS))


@pytest.fixture(scope="module")
def saved(state, tmp_path_factory):
    path = tmp_path_factory.mktemp("pages") / "judge.html"
    state.trace.save(path)
    return path


def test_the_page_needs_nothing_else(saved):
    text = saved.read_text()
    assert not re.search(
        r"""https?://|//\w|src=|href=|url\(|@import|fetch\(|XMLHttp""", text.replace("</", "")
    )
    assert "default-src 'none'" in text
    assert text.count("</script>") == 2


def test_data_cannot_end_its_element():
    assert "<" not in script({"text": "</script><!--"})


def test_texts_that_calls_share_are_in_the_page_once(state):
    data = report_data(state.trace)
    assert sum(NASTY in text for text in data["texts"]) == 1
    gens = data["root"]["children"]
    prompt = "".join(data["texts"][number] for number in gens[0]["prompt"])
    assert prompt == state.trace.children[0].prompt
    assert report(state.trace).count("An essay with") == 1


@needs_browser
def test_the_tree_is_drawn(saved, state, tmp_path):
    document = rendered(saved.as_uri(), profile=tmp_path)
    calls = list(state.trace.walk())
    assert document.count('class="row') == len(calls)
    assert document.count('class="work"') == state.trace.requests
    said = words(document)
    usage = state.usage
    assert f"{usage.cached_tokens} prompt tokens from the cache" in said
    assert f"{usage.prompt_tokens - usage.cached_tokens} prompt tokens computed" in said
    assert "2 tokens forced by a grammar" in said
    assert "broken" not in document.split("<body>")[0]
    for kind in ("cached", "computed", "generated", "forced"):
        assert re.search(rf'class="{kind}" style="width: ', document), kind


@needs_browser
def test_a_call_shows_its_prompt_its_output_and_why_it_was_computed(saved, state, tmp_path):
    calls = list(state.trace.walk())
    number = next(i for i, call in enumerate(calls) if call.name == "verdict" and "logic" in call.prompt)
    document = rendered(f"{saved.as_uri()}#call={number}", profile=tmp_path)
    assert "Parts from gen 'verdict': ' logic' where that one has ' clarity'." in words(document)
    cached = re.search(r'<span class="p cached"[^>]*>(.*?)</span>', document, re.DOTALL)
    computed = re.search(r'<span class="p computed"[^>]*>(.*?)</span>', document, re.DOTALL)
    assert html.unescape(cached.group(1)) + html.unescape(computed.group(1)) == calls[number].prompt
    assert re.findall(r'<span class="t generated" data-index="\d+">([^<]*)</span>', document) == [
        "Good",
        ".",
        "⌁",
    ]


@needs_browser
def test_a_tool_shows_its_arguments_and_its_result(tmp_path):
    def search(words: str) -> str:
        return f"<b>{words.upper()}</b>"

    @rm.function
    def program(s):
        s += rm.user("Go.", tools=[search])
        s.call_tools([search], "calls")

    script = rm.ScriptedBackend({"calls": rm.ToolCall("search", {"words": "the <sea>"})})
    program.run(backend=script).trace.save(tmp_path / "page.html")
    said = words(
        rendered(f"{(tmp_path / 'page.html').as_uri()}#call=2", profile=tmp_path).split('id="detail"')[1]
    )
    assert """Arguments{"words": "the <sea>"}Result<b>THE <SEA></b>""" in said


@needs_browser
def test_hovering_shows_a_token(saved, state, tmp_path):
    tip = rendered(f"{saved.as_uri()}#call=1&token=1&theme=dark", profile=tmp_path)
    assert 'data-theme="dark"' in tip
    said = words(tip.split('id="tip"')[1])
    assert "·is" in said
    assert "p 90.5%, log-probability -0.100" in said
    last = len(list(state.trace.walk())) - 1
    forced = rendered(f"{saved.as_uri()}#call={last}&token=2", profile=tmp_path)
    assert "forced by the grammar" in words(forced.split('id="tip"')[1])
    assert forced.count('class="t forced') == 2


def test_a_run_that_failed_and_one_that_did_nothing(tmp_path):
    @rm.function
    def program(s, fail):
        if fail:
            s += "Q" + rm.gen("x", max_tokens=1, logprobs=0) + rm.gen("missing")

    for fail in (True, False):
        state = program.run(fail, backend=rm.ScriptedBackend({"x": "a b"}))
        state.trace.save(str(tmp_path / "page.html"))
        data = report_data(state.trace)
        assert len(data["root"]["children"]) == 2 * fail
    if BROWSER is not None:
        assert 'class="row' in rendered((tmp_path / "page.html").as_uri(), profile=tmp_path / "profile")
