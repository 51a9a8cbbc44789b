"""The HTML of states, traces, batches and completions in notebooks, and the view of a running program."""

from __future__ import annotations

import asyncio
import html
import re
import sys
import threading
from html.parser import HTMLParser
from types import ModuleType

import pytest

import ramify as rm
from ramify.html.fragment import FOLD, MOST, text
from ramify.messages import Finish, Usage
from ramify.runtime.engine import display
from ramify.runtime.engine.completion import Completion
from tests.browser import needs_browser, rendered, words
from tests.lang.backends import Holding
from tests.lang.steps import add, program_of

NASTY = """<script>document.title='broken'</script> & "quotes' <b>"""


@rm.function
def talk(s, topic):
    s += rm.system("Be brief.", tools=[add]) + rm.user("About " + topic)
    s += rm.assistant("I say: " + rm.gen("first") + rm.select("pick", ["yes", "no"]))
    s += rm.user("2 + 3?")
    s.call_tools([add], "calls")
    forks = s.fork(2)
    forks += rm.user("Why?") + rm.assistant(rm.gen("why"))
    forks.join()
    s += rm.user("End.") + rm.assistant(rm.gen("last"))


CALL = '\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
ANSWERS = {"first": "cats" + NASTY, "pick": "no", "calls": CALL, "why": "Because.", "last": "Done."}


def page_of(value):
    """The HTML that IPython asks a value for."""
    return value._repr_html_()


def shown(page):
    """The text of a page, without its style."""
    return html.unescape(re.sub(r"<[^>]+>", "\n", re.sub(r"<style>.*?</style>", "", page)))


def marked(page):
    """The generated texts of a page."""
    return [html.unescape(found) for found in re.findall(r"<mark>(.*?)</mark>", page, re.DOTALL)]


def check(page):
    """The page is escaped, loads nothing and runs nothing."""
    assert page.startswith('<div class="ramify">')
    assert not re.search(r"<script|https?://|src=|href=|url\(|@import|\son\w+=", page)
    assert page.count("<b>") == 1  # the title's
    assert page.count("<div") == page.count("</div>")
    assert page.count("<details") == page.count("</details>")


def test_a_state_shows_turns_with_what_was_generated():
    state = talk.run(NASTY, backend=rm.ScriptedBackend(ANSWERS))
    page = page_of(state)
    check(page)
    assert f"About {NASTY}" in shown(page)
    assert marked(page) == ["cats" + NASTY, "no", 'add({"a": 2, "b": 3})', "Done.", "Because.", "Because."]
    assert re.findall(r'class="turn (\w+)"', page)[:5] == ["system", "user", "assistant", "user", "assistant"]
    assert "<|im_start|>" not in page
    assert "[tools: add]" in shown(page)
    assert "'Done.'" in shown(page)  # the variable
    assert f"{state.trace.requests} requests" in shown(page)
    assert repr(NASTY)[1:-1] not in page


def test_thoughts_are_folded():
    @rm.function
    def program(s):
        s += rm.user("Q") + rm.assistant("A: " + rm.gen("x", thinking=True))

    state = program.run(backend=rm.ScriptedBackend({"x": f"<think>{NASTY}</think>\n\nYes."}))
    page = page_of(state)
    check(page)
    assert state.thinking("x") == NASTY
    assert marked(page) == [NASTY, "Yes."]
    assert page.index("<summary>thoughts</summary>") < page.index("Yes.")


def test_a_failed_state_shows_the_error_its_line_and_the_partial_output():
    @rm.function
    def program(s):
        s += "Q: " + rm.gen("year", schema=int, validate=refuse)

    def refuse(value):
        raise ValueError("<never>")

    state = program.run(backend=rm.ScriptedBackend({"year": "1998"}))
    page = page_of(state)
    check(page)
    assert "failed" in shown(page)
    assert "<never>" in shown(page)
    assert __file__ in shown(page)
    assert marked(page) == ["1998"]


def test_long_texts_are_folded_and_bounded():
    backend = rm.ScriptedBackend({**ANSWERS, "last": "x " * 10_000})
    state = talk.run("word " * 100_000, backend=backend, max_tokens=20_000)
    for page, told in (
        (page_of(state), "more characters"),
        (page_of(state.trace), "characters, then"),
    ):
        check(page)
        assert len(page) < 5 * MOST
        assert told in page
    folded = text([("a" * FOLD, False), ("b" * 10, True)])
    assert folded.index("</summary>") < folded.index("b" * 10)
    assert "1,000 characters that are not shown" in text([("a" * (MOST + 1000), False)])
    assert text([("a" * FOLD + "b", False)], end=True).endswith("a" * (FOLD - 1) + "b</div>")


def test_many_turns_calls_and_variables_are_counted():
    @rm.function
    def program(s):
        for number in range(300):
            s += rm.user(f"Turn {number}.") + rm.assistant(rm.gen(f"x{number}"))
        s.fork(20).join()

    state = program.run(backend=rm.ScriptedBackend(lambda request: "ok"))
    page = shown(page_of(state))
    assert "560 earlier turns" in page
    assert "Turn 299." in page
    assert "250 more" in page
    assert "4 more branches" in page
    assert "171 more calls" in shown(page_of(state.trace))


def test_a_value_whose_repr_fails():
    class Broken:
        def __repr__(self):
            raise RuntimeError

    @rm.function
    def program(s):
        s["x"] = Broken()

    page = page_of(program.run(backend=rm.ScriptedBackend([])))
    assert "<Broken, whose repr raised RuntimeError>" in shown(page)


class Tree(HTMLParser):
    """The tree of a trace's page: `rows` has (depth, label, facts) of each call, in order."""

    def __init__(self, page):
        super().__init__()
        self.rows, self.depth, self.css = [], 0, ""
        self.feed(page)
        assert self.depth == 0

    def handle_starttag(self, tag, attrs):
        self.depth += tag == "ul"
        self.css = dict(attrs).get("class", "")

    def handle_endtag(self, tag):
        self.depth -= tag == "ul"

    def handle_data(self, data):
        if self.css == "name":
            self.rows.append((self.depth, data, []))
        elif self.css == "soft" and self.rows:
            self.rows[-1][2].append(data)
        self.css = ""


def test_a_trace_is_a_tree():
    state = talk.run(NASTY, backend=rm.ScriptedBackend(ANSWERS))
    page = page_of(state.trace)
    check(page)
    rows = Tree(page).rows
    assert [(depth, name) for depth, name, _ in rows] == [
        (1, "talk"),
        *((2, "gen first"), (2, "select pick"), (2, "gen calls"), (3, "tool add")),
        *((2, "fork 0"), (3, "gen why"), (2, "fork 1"), (3, "gen why")),
        (2, "gen last"),
    ]
    for (_, _, facts), call in zip(rows, state.trace.walk(), strict=True):
        assert f"{call.duration_s:.3f} s" in facts[0]
        assert (f"{call.usage.completion_tokens:,} output" in facts[0]) == (call.kind != "tool")
    assert page.count("<summary>prompt</summary>") == state.trace.requests
    assert "About" + " " + NASTY in shown(page)
    assert '{"a": 2, "b": 3} → 5' in shown(page)
    assert repr(state.trace) == str(state.trace)  # in a console


def test_attempts_are_below_their_step():
    @rm.function
    def program(s):
        s += "Q: " + rm.gen("year", schema=int, retries=1, validate=refuse_small)

    def refuse_small(value):
        if value < 5:
            raise ValueError("<too small>")

    state = program.run(backend=rm.ScriptedBackend({"year": ["3", "7"]}))
    page = page_of(state.trace)
    check(page)
    assert [(depth, name) for depth, name, _ in Tree(page).rows] == [
        *((1, "program"), (2, "gen year"), (3, "attempt year"), (3, "attempt year"))
    ]
    assert marked(page) == ["7", "3", "7"]
    assert "<too small>" in shown(page)


def test_the_models_are_shown_where_there_are_several():
    @rm.function
    def program(s):
        s += rm.user("Q") + rm.assistant(rm.gen("first") + rm.gen("last", backend="<big>"))

    backends = rm.Router({"small": rm.ScriptedBackend(ANSWERS), "<big>": rm.ScriptedBackend(ANSWERS)})
    state = program.run(backend=backends)
    assert marked(page_of(state)) == ["cats" + NASTY, "Done."]
    for page in (page_of(state), page_of(state.trace)):
        check(page)
        assert "small · <big>" in shown(page)


def test_a_batch_and_a_completion(tmp_path):
    rows = [{"topic": "a"}, {"topic": "b"}]
    backend = rm.ScriptedBackend({**ANSWERS, "first": [f"x {NASTY}", ValueError(NASTY)]})
    summary = talk.run_batch(rows, out=tmp_path / "out.jsonl", backend=backend, concurrency=1)
    page = page_of(summary)
    check(page)
    assert "2\n" in shown(page)
    assert f"first error: {summary.first_error}" in shown(page)
    usage = Usage(prompt_tokens=12345, cached_tokens=3, completion_tokens=5)
    page = page_of(Completion(text=NASTY, ids=(), finish=Finish(reason="stop"), usage=usage))
    check(page)
    assert marked(page) == [NASTY]
    assert "12,345 prompt tokens, 3 cached" in shown(page)


# --- backends -----------------------------------------------------------------------------------


def test_an_engine_that_was_not_started_shows_its_model(model_folder):
    engine = rm.Engine(str(model_folder))
    assert repr(engine) == f"<Engine {model_folder} not started>"
    page = page_of(engine)
    check(page)
    assert "not started" in shown(page)
    assert str(model_folder) in shown(page)
    assert "Python 3." in shown(page)
    assert "KV tokens" not in shown(page)
    assert engine.pids == {}
    assert repr(engine).endswith("not started>")
    engine.close()
    assert repr(engine) == f"<Engine {model_folder} closed>"
    assert "closed" in shown(page_of(engine))


async def test_an_engine_that_starts(model_folder, monkeypatch):
    engine, release = rm.Engine(str(model_folder)), asyncio.Event()
    monkeypatch.setattr(engine._frontend, "start", release.wait)
    starting = asyncio.create_task(engine.info())
    await asyncio.sleep(0)
    assert "starting" in repr(engine)
    assert "starting" in shown(page_of(engine))
    starting.cancel()
    await asyncio.wait((starting,))
    engine.close()


def test_a_running_engine_shows_its_counters(engine, monkeypatch):
    engine.complete("Hi", max_tokens=3, ignore_eos=True)
    stats = engine.stats()
    info = engine._frontend.info
    assert info.kv_room is not None
    room = f"context {info.context_length:,}, KV of {info.kv_room.tokens:,} tokens"
    assert repr(engine) == f"<Engine {info.name} ready: cpu {info.dtype}, {room}>"
    page = page_of(engine)
    check(page)
    text = shown(page)
    assert "0 running, 0 waiting" in text
    assert f"of {stats.pages_total * stats.page_size:,}" in text
    assert re.search(r"0 in use \+ [1-9][\d,]* cached", text)
    assert f"GiB in {len(engine.pids)} processes" in text

    async def never():
        await asyncio.Event().wait()

    monkeypatch.setattr(engine._frontend.control, "stats", never)
    monkeypatch.setattr(display, "STATS_S", 0.01)
    text = shown(page_of(engine))
    assert "0 in flight" in text
    assert "KV tokens" not in text


def test_remote_backends_name_their_server_and_no_secret():
    endpoint = rm.RuntimeEndpoint("http://me:secret@127.0.0.1:1/x", api_key="secret")
    assert repr(endpoint) == "<RuntimeEndpoint http://127.0.0.1:1/x>"
    remote = rm.OpenAI("big", base_url="https://me:secret@example.com/v1", api_key="secret")
    assert repr(remote) == "<OpenAI big at https://example.com/v1>"


@needs_browser
@pytest.mark.parametrize("colors", ["#ffffff #111111", "#111111 #dddddd"])
def test_a_browser_shows_all_of_it(colors, tmp_path):
    background, ink = colors.split()
    state = talk.run(NASTY, backend=rm.ScriptedBackend(ANSWERS))
    page = f"<body style='background:{background};color:{ink}'>{page_of(state)}{page_of(state.trace)}"
    (tmp_path / "page.html").write_text(f"<!doctype html><meta charset=utf-8><title>fine</title>{page}")
    document = rendered((tmp_path / "page.html").as_uri(), profile=tmp_path / "profile")
    assert "<title>fine</title>" in document
    assert f"About {NASTY}" in words(document)
    assert "add({&quot;a&quot;: 2" in document or 'add({"a": 2' in document


# --- while it runs ------------------------------------------------------------------------------


class Screen:
    """IPython's display; `pages` holds all that it showed."""

    def __init__(self, shell="ZMQInteractiveShell"):
        self.pages = []
        self.module = ModuleType("IPython")
        self.module.get_ipython = lambda: type(shell, (), {})()
        self.module.display = ModuleType("IPython.display")
        self.module.display.display = self.display

    def display(self, page, *, raw, display_id):
        assert raw
        assert display_id
        self.pages.append(page)
        self.displayed()
        return self

    def displayed(self):
        """Called after the first page of a display."""

    def update(self, page, *, raw):
        assert raw
        self.pages.append(page)


@pytest.fixture
def screen(monkeypatch):
    made = Screen()
    monkeypatch.setitem(sys.modules, "IPython", made.module)
    monkeypatch.setitem(sys.modules, "IPython.display", made.module.display)
    return made


def test_a_running_state_shows_what_has_come():
    backend = Holding(ANSWERS)
    state = talk.run("x", backend=backend, stream=True)
    next(state.text_iter("first"))
    page = page_of(state)
    check(page)
    assert marked(page) == ["cats"]
    assert "running" in shown(page)
    assert "not set yet" in shown(page)
    backend.release.set()
    state.sync()
    assert marked(page_of(state))[-1] == "Because."


def test_a_notebook_is_updated_until_the_program_is_done(screen):
    backend = Holding(ANSWERS)
    state = talk.run("x", backend=backend, stream=True)
    next(state.text_iter("first"))
    screen.displayed = backend.release.set
    state.show()
    first, last = screen.pages[0], screen.pages[-1]
    assert last["text/html"] == page_of(state)
    assert last["text/plain"] == repr(state)
    assert "running" in shown(first["text/html"])


def test_displaying_a_running_state_shows_its_end(screen):
    backend = Holding(ANSWERS)
    state = talk.run("x", backend=backend, stream=True)
    backend.started.block()
    state._ipython_display_()  # returns while the program waits for the backend
    assert backend.holding == 1
    backend.release.set()
    state.sync()
    for thread in threading.enumerate():
        if thread.name == "ramify-view":
            thread.join()
    assert screen.pages[-1]["text/html"] == page_of(state)
    with pytest.raises(NotImplementedError):
        state._ipython_display_()


def test_a_state_that_fails_is_shown_and_not_raised(screen):
    state = talk.run("x", backend=rm.ScriptedBackend({}), stream=True)
    state.show()
    assert "failed" in shown(screen.pages[-1]["text/html"])


async def test_an_async_program_is_shown_without_blocking_its_loop(screen):
    backend = Holding(ANSWERS)

    @rm.function
    async def program(s):
        s += rm.user("Q") + rm.assistant(rm.gen("first"))
        await s.aget("first")

    state = await program.run(backend=backend, stream=True)
    await backend.started.wait()
    state.show()
    backend.release.set()
    await state.wait()
    assert state["first"].startswith("cats")


def test_a_terminal_gets_text(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", Screen("TerminalInteractiveShell").module)
    for stream in (True, False):
        state = talk.run("x", backend=rm.ScriptedBackend(ANSWERS), stream=stream)
        state.show()
        said = capsys.readouterr().out
        assert said.startswith(state.text())
        assert "\n6 requests" in said
        with pytest.raises(NotImplementedError):
            state._ipython_display_()
    program_of("Q" + rm.gen("x")).run(backend=rm.ScriptedBackend({"x": "a"})).show()
    assert capsys.readouterr().out.startswith("Qa\n1 request ")  # on a line of its own
    talk.run("x", backend=rm.ScriptedBackend({}), stream=True).show()
    assert "failed: gen 'first'" in capsys.readouterr().out


def test_in_a_real_shell(monkeypatch):
    shell_module = pytest.importorskip("IPython.core.interactiveshell")
    capture = pytest.importorskip("IPython.utils.capture")
    shell = shell_module.InteractiveShell.instance()
    try:
        shell.user_ns["state"] = talk.run("x", backend=rm.ScriptedBackend(ANSWERS), stream=True)
        with capture.capture_output() as output:
            shell.run_cell("state.show()")
        assert "text/html" in output.outputs[-1].data
        data, _ = shell.display_formatter.format(shell.user_ns["state"])
        assert data["text/html"] == page_of(shell.user_ns["state"])
        assert data["text/plain"] == repr(shell.user_ns["state"])
    finally:
        shell_module.InteractiveShell.clear_instance()
