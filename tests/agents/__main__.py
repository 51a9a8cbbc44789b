"""Runs a session of every agent, and writes docs/clients.md: 10 minutes.

The agents are in the folder that the environment variable ``AGENTS_FOLDER`` names. With the argument
``install`` their newest releases are installed there first, with npm and pip.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.agents.clients import CLIENTS, Client
from tests.agents.page import SNIPPETS, TABLE, rewrite, snippets, table
from tests.agents.serving import scripted_server
from tests.agents.session import Player, Session


def install(agents: Path) -> None:
    """Install the newest releases of all agents."""
    for client in {client.package: client for client in CLIENTS}.values():
        folder = client.folder(agents)
        if client.package == "aider":
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            subprocess.run([str(folder / "bin" / "pip"), "install", "--upgrade", "aider-chat"], check=True)
        else:
            subprocess.run(
                ["npm", "install", "--prefix", str(folder), f"{client.package}@latest"], check=True
            )


def main(agents: Path) -> int:
    """Run all sessions; returns the number of those with a fault."""
    rows: list[tuple[Client, str, Session]] = []
    for script in dict.fromkeys(client.script for client in CLIENTS):
        with (
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name,
            scripted_server(script, Path(name)) as served,
        ):
            for client in CLIENTS:
                program = client.program(agents)
                if client.script == script and program is not None:
                    folder = Path(name) / client.id
                    folder.mkdir()
                    session = Player(client, program, served, folder).play()
                    rows.append((client, client.version(agents), session))
                    print(client.id, session.faults(client) or "passed", flush=True)
    rows.sort(key=lambda row: CLIENTS.index(row[0]))
    rewrite(table(rows), TABLE)
    rewrite(snippets(), SNIPPETS)
    return sum(bool(session.faults(client)) for client, _, session in rows)


if __name__ == "__main__":
    folder = Path(os.environ["AGENTS_FOLDER"]).absolute()
    if sys.argv[1:] == ["install"]:
        install(folder)
    raise SystemExit(min(main(folder), 1))
