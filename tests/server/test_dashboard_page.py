"""The dashboard as a browser draws it, mostly for fixed answers of /live."""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest

from ramify.engine_messages import TreeNode
from ramify.html.template import fill
from tests.browser import needs_browser, rendered, words
from tests.server.fake_frontend import MODEL, FakeFrontend, LiveServer
from tests.server.test_dashboard import ask, live

pytestmark = needs_browser

NASTY = "<img src=x onerror=\"document.title='broken'\"></script> & so on"
TREE = (
    TreeNode(parent=0, start=0, tokens=120, pages=8, state="in_use", locks=2),
    TreeNode(parent=1, start=120, tokens=40, pages=3, state="leased", owners=("p1",), hidden=3),
    TreeNode(parent=1, start=120, tokens=30, pages=2, state="evictable"),
)
NARROW = """<body><iframe width="420" height="900" src="/"></iframe><script>
setTimeout(() => {
  const page = frames[0].document, range = page.createRange();
  const lines = title => { range.selectNodeContents(title); return range.getClientRects().length; };
  const broken = [...page.querySelectorAll("h1, h2")].filter(title => lines(title) > 1);
  const { scrollWidth, clientWidth } = page.scrollingElement;
  document.body.innerHTML = page.body.outerHTML;
  document.body.dataset.overflow = scrollWidth - clientWidth;
  document.body.dataset.broken = broken.map(title => title.textContent).join();
}, 1500);
</script>"""
"""The dashboard in a frame, since windows are at least 500 px wide. A script measures the pixels by which the
page is wider, and finds the titles of several lines."""


def test_what_the_page_draws(tmp_path: Path) -> None:
    frontend = FakeFrontend()
    frontend.nodes = TREE
    with LiveServer(frontend, api_key="sesame") as server:
        headers = {"authorization": "Bearer sesame", "user-agent": NASTY}
        with httpx.Client(base_url=server.url, timeout=60, headers=headers) as client:
            ask(client, NASTY, path=("gen first",))
            for number in range(2):
                path = (f"fork {number}", "gen verdict")
                ask(client, f"{NASTY} {number}", path=path, forks=["0/2"], name="judge " + NASTY)
            client.post("/v1/completions", json={"model": MODEL, "prompt": "hello", "max_tokens": 3})
        page = rendered(f"http://me:sesame@127.0.0.1:{server.port}/#program=p1&theme=dark", profile=tmp_path)
    said = words(page)
    assert "broken" not in page.split("<body>")[0]
    assert 'data-theme="dark"' in page
    assert page.count('class="program') == 2
    assert page.count('class="row') == 1 + 1 + 2 * 2
    assert page.count('class="work"') == 3
    for state in ("in_use", "leased", "evictable"):
        assert page.count(f'class="node {state}"') == 1
    assert "3 nodes, 190 tokens shown; there are more" in said
    assert "+ 3 more" in said
    assert "64 of 16 tokens each" in said
    assert "3 calls" in said
    assert NASTY[:20] in said


@pytest.fixture
def answer() -> Any:
    """An answer of /live about a server that has had no request yet."""
    with LiveServer(FakeFrontend()) as server, httpx.Client(base_url=server.url) as client:
        return live(client)


@contextlib.contextmanager
def serving(answer: Any) -> Iterator[str]:
    """The address of the dashboard of a server that always gives `answer`."""
    template = files("ramify.runtime.server.admin").joinpath("dashboard.html").read_text(encoding="utf-8")
    page = fill(template, "SmolLM2-135M-Instruct")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            live = self.path.startswith("/live")
            shown = NARROW if self.path == "/narrow" else page
            body = (json.dumps(answer) if live else shown).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json" if live else "text/html; charset=utf-8")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join()


def drawn(answer: Any, tmp_path: Path, path: str = "") -> str:
    """The body of the page, as HTML."""
    with serving(answer) as address:
        return rendered(address + path, profile=tmp_path).split("<body", 1)[1]


def call(**given: Any) -> dict[str, Any]:
    base = {"rid": "r", "path": ["gen x"], "forks": [], "start": 0.0, "first": 0.5, "end": 1.0}
    base |= {"prompt_tokens": 100, "cached": 40, "out": 10, "forced": 0, "evicted": 0, "evicted_by": ""}
    base |= {
        "retractions": 0,
        "outcome": "stop",
        "error": "",
        "client": "curl/8.5.0",
        "prompt": "",
        "text": "",
    }
    return base | given


def program(name: str, calls: list[dict[str, Any]], **given: Any) -> dict[str, Any]:
    """A program in the answer of /live, with the sums of its calls."""
    running = sum(one["end"] is None for one in calls)
    sums = {"prompt_tokens": "prompt_tokens", "cached_tokens": "cached", "completion_tokens": "out"}
    whole = {name: sum(one[key] for one in calls) for name, key in sums.items()}
    base = {
        "id": name if name.startswith("/") else name + "-1",
        "name": name,
        "age_s": 300.0,
        "idle_s": 200.0,
        "took_s": 1.0,
        "requests": len(calls),
    }
    base |= {"running": running, "failed": 0, "failed_s": None, "ended": False, "client": "curl/8.5.0"}
    base |= {"prompt": "Why?", "forced_tokens": 0, "evicted_tokens": 0, "now": 300.0, "calls": calls}
    return base | whole | given


def with_programs(answer: Any, *programs: dict[str, Any]) -> Any:
    """`answer` with `programs`, of which the first is chosen."""
    return answer | {"programs": list(programs), "chosen": programs[0]}


def tags(page: str, css: str) -> list[str]:
    """The elements of the class, as the tag that opens each, and the text up to the next tag."""
    return re.findall(rf'<[a-z]+ class="{css}"[^>]*>[^<]*', page)


def share(tag: str, name: str) -> float:
    """A size in the style of `tag`, in percent."""
    return float(re.findall(rf"\b{name}: (?:calc\()?([\d.e-]+)%", tag)[0])


def test_an_empty_page_says_what_to_send(answer: Any, tmp_path: Path) -> None:
    with serving(answer | {"api_key": True}) as address:
        said = words(rendered(address, profile=tmp_path))
    key = "-H 'authorization: Bearer YOUR_KEY'"
    assert f"curl {address}v1/chat/completions -H 'content-type: application/json' {key} -d" in said


def test_the_line_of_the_empty_page_is_answered(fresh_url: str) -> None:
    body = '{"model": "default", "messages": [{"role": "user", "content": "Name a city in France."}]}'
    template = files("ramify.runtime.server.admin").joinpath("dashboard.html").read_text(encoding="utf-8")
    assert f"-d '{body}'" in template
    headers = {"content-type": "application/json"}
    assert httpx.post(f"{fresh_url}/v1/chat/completions", content=body, headers=headers).status_code == 200


@pytest.fixture
def fresh_url() -> Iterator[str]:
    with LiveServer(FakeFrontend()) as server:
        yield server.url


def test_a_row_tells_its_client_excerpt_tokens_and_time(answer: Any, tmp_path: Path) -> None:
    prompt = "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n"
    calls = [call(rid="r7", path=["r7"], prompt=prompt, text="Because of", client="OpenAI/Python 3.57.0")]
    endpoint = program("/v1/completions", calls, prompt=prompt, client="OpenAI/Python 3.57.0")
    page = drawn(with_programs(answer, endpoint), tmp_path)
    listed, row = page.split('id="calls"')
    for text in (
        "OpenAI/Python 3.57.0",
        ">Why is the sky blue?</bdi>",
        "1 call, 100 → 10 tokens, 1.00 s",
    ):
        assert text in listed
    for text in ("Why is the sky blue?", "OpenAI/Python 3.57.0", "Because of", "100 → 10", "1.00 s"):
        assert text in words(row)
    assert "im_start" not in page


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a program with a call of ten minutes and several of a second, of two programs that failed
    before, of a tree with a prompt of 30,000 tokens, and of three intervals of throughput."""
    with LiveServer(FakeFrontend()) as server, httpx.Client(base_url=server.url) as client:
        answer = live(client)
    calls = [call(start=0.0, first=590.0, end=600.0)]
    calls += [call(start=591.0 + n, first=591.5 + n, end=592.0 + n) for n in range(5)]
    calls.append(call(start=590.0, end=591.0, outcome="error", error="Too long."))
    calls.append(call(start=590.0, end=591.0, outcome="abort"))
    calls.append(call(start=599.0, end=None))
    programs = [
        program("fresh", calls, failed=1, failed_s=5.0, now=600.0),
        program("aged", [call()], failed=2, failed_s=330.0),
        program("old", [call()], failed=3, failed_s=7200.0),
    ]
    nodes = [[-1, 0, 0, 0, "evictable"], [0, 0, 30_000, 1875, "in_use"]]
    nodes += [[0, 0, 40 + n, 3, "evictable"] for n in range(6)]
    sums = {"prompt_tokens": [100, 0, 300], "cached_tokens": [50, 0, 300], "output_tokens": [0, 1000, 500]}
    throughput = {"interval_s": 5.0, "intervals": 120, **sums}
    answer = with_programs(answer, *programs) | {"tree": nodes, "throughput": throughput}
    return drawn(answer, tmp_path_factory.mktemp("profile"))


def test_a_failure_ages(busy: str) -> None:
    failures = re.findall(r"var\(--bad\) (\d+)%[^>]*>([^<]*)", busy)
    assert failures == [("100", "1 failed 5 s ago"), ("50", "2 failed 6 min ago"), ("0", "3 failed 2 h ago")]
    (row,) = tags(busy, "row failed")
    assert "--fresh: 100%" in row


def test_running_and_aborted_calls_are_not_red(busy: str) -> None:
    assert tags(busy, "on") == ['<span class="on">1 running']
    assert busy.count('class="row live"') == 1
    assert '<span class="kind">gen aborted' in busy


def test_a_long_request_leaves_room_for_the_others(busy: str) -> None:
    bars = tags(busy, "work")
    assert share(bars[0], "width") > 98
    assert all(share(bar, "width") > 1.9 for bar in bars[1:])  # not 1/600
    assert "linear-gradient" in re.findall("--breaks: ([^;]*)", busy)[0]
    assert "10.0 min" in words(busy)


def test_a_long_prompt_leaves_room_for_the_rest_of_the_tree(busy: str) -> None:
    boxes = tags(busy, "node evictable")
    assert len(boxes) == 6
    assert all(share(box, "width") > 4 for box in boxes)  # not 40/30000
    assert tags(busy, "node in_use")[0].endswith(">30,000")


def test_the_curves(busy: str) -> None:
    speed, parts = busy.split('id="speed"')[1].split('id="share"')
    assert 'd="M117 1H118V0H119V0.5H120"' in speed  # of 200 tokens/s
    assert 'd="M117 0.5H118M119 0H120"' in parts
    assert "1,500 tokens" in speed
    assert "88% of 400 tokens" in parts
    for text in (">200<", "10 min ago", "5 min ago", "now"):
        assert text in speed
    assert ">100%<" in parts


def test_calls_of_like_length_have_an_unbroken_scale(answer: Any, tmp_path: Path) -> None:
    calls = [call(start=10.0 * n, first=10.0 * n + 1, end=10.0 * n + 5) for n in range(4)]
    page = drawn(with_programs(answer, program("p", calls, requests=4)), tmp_path)
    places = [(share(bar, "left"), share(bar, "width")) for bar in tags(page, "work")]
    assert places == [pytest.approx((100 * 10 * n / 35, 100 * 5 / 35), abs=0.1) for n in range(4)]


def test_a_narrow_window(answer: Any, tmp_path: Path) -> None:
    calls = [call(rid="r" * 80, path=["r" * 80], prompt="x" * 160, text="y" * 160, client="c" * 40)] * 3
    calls += [call(path=["fork 1"] * 20 + ["gen verdict"], forks=["0/1"] * 20)]
    endpoint = "/v1/chat/completions"
    many = program(endpoint, calls, prompt="x" * 160, client="c" * 40, failed=3, failed_s=9.0)
    stats = answer["stats"]
    fleet = {"replicas": {"0": stats, "1": None}, "states": {"0": "up", "1": "gone"}}
    tree = [[-1, 0, 0, 0, "evictable"], [0, 0, 30_000, 1875, "in_use"], [0, 0, 9, 1, "leased"]]
    page = drawn(with_programs(answer, many) | {"stats": stats | fleet, "tree": tree}, tmp_path, "narrow")
    assert 'data-overflow="0"' in page
    assert 'data-broken=""' in page
    assert "replica 1: gone" in words(page)


def test_an_empty_page_in_a_narrow_window(answer: Any, tmp_path: Path) -> None:
    page = drawn(answer, tmp_path, "narrow")
    assert 'data-overflow="0"' in page
    assert 'data-broken=""' in page
    assert "/v1/chat/completions -H 'content-type: application/json' -d" in words(page)
