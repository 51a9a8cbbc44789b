"""Takes the pictures of docs/images: a trace of examples/judge.py, and the dashboard of a server under load.

``make screenshots``, or ``python docs/screenshots.py [--seconds 150]``. Needs chromium and the default model.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
from PIL import Image

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import ramify as rm  # noqa: E402
from examples.judge import ESSAY, judge  # noqa: E402
from tests.browser import BROWSER  # noqa: E402

IMAGES = ROOT / "docs" / "images"
COLOURS = 128
"""Colours of a picture: with all of them it takes three times the space, and looks the same."""
CITIES = ("Lyon", "Porto", "Graz", "Turku", "Bergen", "Ghent")
RULES = " ".join(f"Rule {n}: ask the owner of ticket {13 * n} before you delete a file." for n in range(60))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=150.0, help="seconds of load before the picture")
    seconds = parser.parse_args().seconds
    if BROWSER is None:
        print(
            "Screenshots need chromium, chromium-browser or google-chrome; none is on PATH.", file=sys.stderr
        )
        return 1
    IMAGES.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "ramify", "serve", "--port", "0", "--drain-s", "0"]
    stopping = threading.Event()
    with tempfile.TemporaryDirectory() as folder, subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            lines = (line.decode() for line in server.stdout)
            url = next(line for line in lines if line.startswith("Serving")).split()[-1]
            backend = rm.RuntimeEndpoint(url)
            report = Path(folder) / "trace.html"
            judge.run(essay=ESSAY, backend=backend).trace.save(report)
            take(f"{report.as_uri()}#call=4", "trace", 1440, 900, Path(folder))
            program = put_load_on(url, backend, seconds, stopping)
            take(f"{url}/#program={program}", "dashboard", 1440, 1180, Path(folder))
        finally:
            stopping.set()
            server.terminate()
    return 0


def put_load_on(url: str, backend: rm.Backend, seconds: float, stopping: threading.Event) -> str:
    """Send requests of four clients, until `stopping` is set and one fails. Returns, after `seconds`, the id
    of a running program."""
    client = httpx.Client(base_url=url, timeout=600)

    def post(path: str, body: dict[str, object], headers: dict[str, str]) -> None:
        client.post(path, json={"model": "default"} | body, headers=headers).raise_for_status()

    def chat(number: int) -> None:
        question = f"What should I see in {CITIES[number % len(CITIES)]} in one day?"
        turns = [{"role": "system", "content": "You are a guide."}, {"role": "user", "content": question}]
        body = {"messages": turns, "max_tokens": 24 + number * 7 % 60}
        post("/v1/chat/completions", body, {"user-agent": "OpenAI/Python 3.57.0"})
        time.sleep(1)

    def story(number: int) -> None:
        body = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True}
        post("/v1/completions", body, {"user-agent": "curl/8.5.0"})

    def agent(number: int) -> None:
        turn = {"role": "user", "content": f"Exit code 0, {17 * number} tests passed. Go on."}
        body = {"system": RULES, "messages": [turn], "max_tokens": 60}
        session = {"user-agent": "claude-cli/2.1.0 (external, cli)", "x-claude-code-session-id": "4f1c2d3e"}
        post("/v1/messages", body, session)
        time.sleep(2)

    def grade(number: int) -> None:
        judge.run(essay=f"{ESSAY}\n({number})", backend=backend)
        time.sleep(4)

    def forever(task: Callable[[int], None]) -> None:
        try:
            for number in itertools.count():
                task(number)
        except (httpx.HTTPError, rm.RamifyError):
            if not stopping.is_set():
                raise

    for task in (chat, chat, story, agent, grade):
        threading.Thread(target=forever, args=(task,), daemon=True).start()
    time.sleep(seconds)
    while True:
        for one in client.get("/live").json()["programs"]:
            if one["name"] == "judge" and one["running"] == 3:
                return str(one["id"])
        time.sleep(0.1)


def take(address: str, name: str, width: int, height: int, folder: Path) -> None:
    """Save a picture of the page at `address`, in light and in dark colours."""
    for theme, suffix in (("light", ""), ("dark", "-dark")):
        raw, file = folder / "raw.png", IMAGES / f"{name}{suffix}.png"
        options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
        size, profile = f"--window-size={width},{height}", f"--user-data-dir={folder / 'profile'}"
        wait = "--virtual-time-budget=1500"
        page = f"{address}&theme={theme}"
        command = [str(BROWSER), *options, size, profile, wait, f"--screenshot={raw}", page]
        subprocess.run(command, capture_output=True, check=True, timeout=100)
        Image.open(raw).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(file, optimize=True)
        print(f"{file.relative_to(ROOT)}: {file.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    raise SystemExit(main())
