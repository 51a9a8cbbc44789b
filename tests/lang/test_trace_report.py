"""The page of a trace, in a headless browser."""

from __future__ import annotations

import html
import json
import re
from typing import Literal

import pytest

import ramify as rm
from ramify.errors import BackendError, WorkerDied
from ramify.html.template import script
from ramify.lang.trace.report import report, report_data
from ramify.retry import Retry
from tests.browser import BROWSER, needs_browser, rendered, words
from tests.lang.backends import PHASES, Timed


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
        state = program.run(fail, backend=rm.ScriptedBackend({"x": "a b"}, strict=False))
        state.trace.save(str(tmp_path / "page.html"))
        data = report_data(state.trace)
        assert len(data["root"]["children"]) == 2 * fail
    if BROWSER is not None:
        assert 'class="row' in rendered((tmp_path / "page.html").as_uri(), profile=tmp_path / "profile")


# --- waiting, failures, recovers ---


def not_twice(value: str) -> None:
    if value == "bad":
        raise ValueError("it is bad")


@pytest.fixture
def mixed(clock):
    """A run with a request that was sent again, a recover, a rejected attempt, and a failure that nobody
    recovered from."""

    class Dying(Timed):
        async def generate(self, request):
            if len(self.requests) == 1 and not self.died:
                self.died = True
                raise WorkerDied("The engine died.")
            async for chunk in super().generate(request):
                yield chunk

    @rm.function
    def program(s):
        s += rm.user("Q") + rm.assistant(rm.gen("kept"))
        s += rm.user("R") + rm.assistant(rm.gen("y") + rm.gen("x"))
        s.sync()
        s.recover()
        s += rm.assistant(rm.gen("tried", validate=not_twice, retries=1))
        s += rm.user("S") + rm.assistant(rm.gen("x"))

    backend = Dying(
        {"kept": "k", "y": "one", "x": [BackendError("gone"), BackendError("lost")], "tried": ["bad", "fine"]}
    )
    backend.died, backend.retry = False, Retry()
    return program.run(backend=backend).trace


def test_the_data_of_a_run_with_failures(mixed):
    kept, y, x, recover, tried, last = report_data(mixed)["root"]["children"]
    assert kept["phases"] == PHASES
    assert kept["failures"] == []
    (failure,) = y["failures"]
    assert failure["error"] == "The engine died."
    assert recover["dropped"] == [2, 3]
    assert recover["lost"] == [y["prompt_tokens"] - y["cached"], y["out"]]
    assert "dropped" not in last
    assert [attempt["error"] for attempt in tried["children"]] == ["it is bad", None]
    assert x["phases"] is None


def test_each_call_of_a_trace_is_saved_alone(mixed, tmp_path):
    for number, call in enumerate(mixed.walk()):
        call.save(tmp_path / f"{number}.html")
        data = report_data(call)["root"]
        assert data["name"] == call.name
        assert not data.get("dropped") or call is mixed


def drawn(trace, folder, fragment="", code="", size=(1280, 900)) -> str:
    """The page of `trace` at `fragment`. `code` is JavaScript that runs at its end."""
    trace.save(folder / "page.html")
    page = (folder / "page.html").read_text().replace("</body>", f"<script>{code}</script></body>")
    (folder / "page.html").write_text(page)
    return rendered(f"{(folder / 'page.html').as_uri()}#{fragment}", profile=folder / "profile", size=size)


def chosen(document: str) -> int:
    (number,) = re.findall(r'class="row[^"]* chosen" id="row(\d+)"', document)
    return int(number)


@needs_browser
def test_waiting_failures_and_recovers_are_drawn_apart(mixed, tmp_path):
    document = drawn(mixed, tmp_path)
    said = words(document)
    for phase, time in (
        ("grammar", "8.00 s"),
        ("queue", "2.00 s"),
        ("computed", "1.00 s"),
        ("generated", "5.00 s"),
    ):
        assert re.search(rf'<i class="{phase}"></i>{time} ', document), phase
    for name in ("grammar", "queue"):
        assert len(re.findall(rf'class="{name}" style="width', document)) == 4, name
    assert document.count('class="failure" style="width') == document.count('class="pause" style="width') == 1
    assert document.count('class="recover"') == 1
    assert re.findall(r'class="row([^"]*) gone( chosen)?" id="row(\d+)"', document) == [
        ("", "", "2"),
        (" failed", "", "3"),
    ]
    assert "1 failed, 1 attempt rejected, 1 recovered" in said
    assert chosen(document) == 8  # the step that failed for good


@needs_browser
@pytest.mark.parametrize(
    ("call", "told"),
    [
        (2, ["The engine died. Failed after", "waiting for the grammar", "Dropped by the recover below"]),
        (4, ["gone The program recovered, and dropped 2 calls: ", "gen y gen x"]),
        (6, ["it is bad"]),
    ],
)
def test_the_detail_says_what_failed(mixed, tmp_path, call, told):
    said = words(drawn(mixed, tmp_path, f"call={call}").split('id="detail"')[1])
    for text in told:
        assert text in said


@needs_browser
def test_the_keyboard_and_links_choose_calls(mixed, tmp_path):
    def pressed(*keys):
        return "".join(
            f"document.dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}'}}));" for key in keys
        )

    assert chosen(drawn(mixed, tmp_path, "call=2", pressed("ArrowDown", "ArrowDown", "ArrowUp"))) == 3
    assert chosen(drawn(mixed, tmp_path, "call=2", pressed("End", "ArrowDown"))) == 8
    # In the detail, which Enter opens, the arrows scroll.
    assert chosen(drawn(mixed, tmp_path, "call=2", pressed("Enter", "ArrowDown"))) == 2
    assert chosen(drawn(mixed, tmp_path, "call=2", pressed("Enter", "Escape", "ArrowDown"))) == 3
    followed = drawn(
        mixed,
        tmp_path,
        "call=4",
        "document.querySelector('#detail a').click(); document.title = location.hash",
    )
    assert chosen(followed) == 2
    assert "<title>#call=2</title>" in followed


MEASURE = """
const [tree, detail, title] = ["tree", "detail", "title"].map(id => at(id).getBoundingClientRect());
const { scrollWidth, scrollHeight } = document.scrollingElement;
document.title = JSON.stringify({
  width: innerWidth, over: scrollWidth - innerWidth, high: scrollHeight - innerHeight,
  wide: tree.width / innerWidth, below: detail.top >= tree.bottom, title: title.height,
});
"""


@needs_browser
@pytest.mark.parametrize(("width", "many"), [(1600, False), (1600, True), (500, False), (500, True)])
def test_the_page_is_used(state, tmp_path, width, many):
    """Few calls, or a narrow window: the timeline has the whole width, and the detail is below it. Many calls
    in a wide window: the detail is beside the timeline, and both fill the window."""

    @rm.function
    def program(s):
        for _ in range(40 if many else 1):
            s += "Q" + rm.gen("x", max_tokens=2)

    trace = program.run(backend=rm.ScriptedBackend(lambda request: "a")).trace
    document = drawn(trace, tmp_path, code=MEASURE, size=(width, 900))
    found = json.loads(html.unescape(re.search("<title>(.*?)</title>", document).group(1)))
    assert found["width"] == width
    assert found["over"] <= 0
    assert found["title"] < 40
    assert found["below"] == (not many or width == 500)
    if found["below"]:
        assert found["wide"] > 0.9
    else:
        assert found["wide"] > 0.5
        assert found["high"] <= 0
    assert chosen(document) == 1
