"""The generated parts of docs/clients.md: how each agent is pointed at a server, and what its session did."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence
from pathlib import Path

from tests.agents.clients import CLIENTS, Client
from tests.agents.session import Session

PAGE = Path(__file__).parent.parent.parent / "docs" / "clients.md"
TABLE = "<!-- sessions: written by `python -m tests.agents` from a run -->\n", "<!-- /sessions -->"
SNIPPETS = "<!-- clients: written by `python -m tests.agents` -->\n", "<!-- /clients -->"


def snippets() -> str:
    """The configuration of all clients, as shell scripts."""
    parts = []
    for agent, clients in itertools.groupby(CLIENTS, key=lambda client: client.agent):
        parts.append(f"\n### {agent}\n")
        for client in clients:
            parts.append(f"\n{client.api}:\n\n```sh\n{_script(client)}```\n")
    return "".join([*parts, "\n"])


def _script(client: Client) -> str:
    lines = [f"export {name}={shlex.quote(value)}" for name, value in client.env.items()]
    for name, text in client.files.items():
        if (folder := Path(name).parent) != Path():
            lines.append(f"mkdir -p ~/{folder}")
        lines.append(f"cat > ~/{name} <<'EOF'\n{text.rstrip()}\nEOF")
    lines += [client.setup] if client.setup else []
    run = client.run.replace("PROMPT", '"Run the tests."')
    return "".join(f"{line}\n" for line in [*lines, run])


def table(rows: Sequence[tuple[Client, str, Session]]) -> str:
    """Rows are clients with their versions and sessions."""
    lines = [
        "",
        "| agent | API | version | first prompt | requests | cached: second | resumed | new | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for client, version, session in rows:
        faults = session.faults(client)
        turns = (session.first, session.resumed, session.new)
        counts = " + ".join(str(len(turn.requests)) for turn in turns)
        complete = all(turn.main for turn in turns) and len(session.first.main) > 1
        shares = [f"{share:.0%}" for share in session.shares] if complete else ["", "", ""]
        prompt = f"{session.first.main[0].prompt:,}" if session.first.main else ""
        told = faults[0] if faults else f"passed. {client.note}".strip()
        lines.append(f"| {' | '.join([client.agent, client.api, version, prompt, counts, *shares, told])} |")
    return "\n".join([*lines, "", ""])


def rewrite(part: str, marks: tuple[str, str]) -> None:
    """Put `part` between the marks on the page."""
    begin, end = marks
    before, _, rest = PAGE.read_text().partition(begin)
    PAGE.write_text(before + begin + part + end + rest.partition(end)[2])
