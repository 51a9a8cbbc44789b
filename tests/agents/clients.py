"""The agents, each with the smallest configuration that points it at a server, and its command lines.

The environment variable ``AGENTS_FOLDER`` names the folder with the agents. An agent's own folder there is
named as its npm package with ``_`` for ``@`` and ``/``, as made by
``npm install --prefix $AGENTS_FOLDER/_openai_codex @openai/codex``. Aider's is ``aider``, a virtual
environment with ``aider-chat``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tests.agents.scripted_model import call_text

URL = "http://127.0.0.1:30000"
"""The server's address in what a client is configured with; a run puts its own server's there."""
MODEL = "local"
"""The model's name there: what `--served-model-name` gives it."""
COMMAND = "echo ran >> ran.log && echo marker | tr a-z A-Z"
"""The command that the model calls. It leaves a line in `ran.log`."""
OUTPUT = "MARKER"
"""The output of `COMMAND`."""

CHAT, RESPONSES, MESSAGES, OLLAMA = "Chat", "Responses", "Messages", "Ollama"


class Script(NamedTuple):
    """The part of a scripted model: agents with the same one share a server."""

    tool: str
    call: str
    tools_first: bool


@dataclass(frozen=True, kw_only=True)
class Client:
    """An agent that speaks one API."""

    agent: str
    package: str
    """The npm package, or "aider"."""
    executable: str
    """The program in the package's folder; the first that the pattern finds."""
    api: str
    tool: str = "bash"
    """The name of the tool that runs a command; "" if the agent runs commands that answers propose."""
    arguments: Mapping[str, object] = field(default_factory=lambda: {"command": COMMAND})
    files: Mapping[str, str] = field(default_factory=dict)
    """Files in the home folder."""
    env: Mapping[str, str] = field(default_factory=dict)
    setup: str = ""
    """A command that configures the agent."""
    run: str
    """The command line of a new session. PROMPT stands for the message, which else comes as input."""
    resume: str
    """The command line of another message in the last session, whose id is SESSION."""
    sessions: str = ""
    """Pattern of the folders in the home folder that are named by ids of sessions."""
    replies: str = ""
    """Input behind the message of a new session."""
    terminal: bool = False
    """Whether sessions are resumed only in the agent's terminal interface, where the message is typed."""
    tools_first: bool = False
    """Whether the model's chat template writes tools before the system message."""
    shares: tuple[float, float, float] = (0.95, 0.95, 0.95)
    """The least cached shares (`Session.shares`)."""
    note: str = ""
    """A sentence for the docs' table."""
    proxy: bool = True
    """Whether the agent honours NO_PROXY, so that a proxy that does not exist keeps it off other hosts."""

    @property
    def script(self) -> Script:
        call = call_text(self.tool, self.arguments) if self.tool else f"```bash\n{COMMAND}\n```"
        return Script(self.tool, call, self.tools_first)

    @property
    def id(self) -> str:
        return f"{self.agent}-{self.api}".lower().replace(" ", "-")

    def folder(self, agents: Path) -> Path:
        return agents / self.package.replace("@", "_").replace("/", "_")

    def program(self, agents: Path) -> Path | None:
        """The executable; None if the agent is not installed."""
        return next(iter(sorted(self.folder(agents).glob(self.executable))), None)

    def version(self, agents: Path) -> str:
        folder = self.folder(agents)
        if self.package == "aider":
            (info,) = folder.glob("lib/python*/site-packages/aider_chat-*.dist-info")
            return info.name.split("-")[1].removesuffix(".dist")
        manifest = folder / "node_modules" / self.package / "package.json"
        return str(json.loads(manifest.read_text())["version"])


CODEX_OPTIONS = "--skip-git-repo-check --dangerously-bypass-approvals-and-sandbox"
CODEX = """\
model = "local"
model_provider = "ramify"

[model_providers.ramify]
name = "Ramify"
base_url = "http://127.0.0.1:30000/v1"
wire_api = "responses"
"""


def _opencode(api: str, npm: str) -> Client:
    options = {"baseURL": URL + "/v1", "apiKey": "none"}
    config = {"provider": {MODEL: {"npm": npm, "options": options, "models": {MODEL: {}}}}}
    return Client(
        agent="OpenCode",
        package="opencode-ai",
        executable="node_modules/opencode-*/bin/opencode",
        api=api,
        files={".config/opencode/opencode.json": json.dumps(config, indent=2)},
        run="opencode run -m local/local PROMPT",
        resume="opencode run -m local/local --continue PROMPT",
    )


def _qwen(api: str, env: dict[str, str]) -> Client:
    kind = "anthropic" if api == MESSAGES else "openai"
    return Client(
        agent="Qwen Code",
        package="@qwen-code/qwen-code",
        executable="node_modules/.bin/qwen",
        api=api,
        tool="run_shell_command",
        arguments={"command": COMMAND, "is_background": False},
        env=env,
        proxy=False,
        run=f"qwen --auth-type {kind} --yolo -p PROMPT",
        resume=f"qwen --auth-type {kind} --yolo --continue -p PROMPT",
    )


def _copilot(api: str, env: dict[str, str]) -> Client:
    return Client(
        agent="Copilot CLI",
        package="@github/copilot",
        executable="node_modules/.bin/copilot",
        api=api,
        arguments={"command": COMMAND, "description": "Run it"},
        env={
            "COPILOT_PROVIDER_BASE_URL": URL + "/v1",
            "COPILOT_MODEL": MODEL,
            "COPILOT_OFFLINE": "true",
            **env,
        },
        tools_first=True,
        note="A session id stands near the end of its system message: see below.",
        run="copilot --allow-all-tools -p PROMPT",
        resume="copilot --allow-all-tools --continue -p PROMPT",
    )


def _pi(api: str, name: str) -> Client:
    base = URL if api == MESSAGES else URL + "/v1"
    provider = {"baseUrl": base, "api": name, "apiKey": "none", "models": [{"id": MODEL}]}
    return Client(
        agent="pi",
        package="@mariozechner/pi-coding-agent",
        executable="node_modules/.bin/pi",
        api=api,
        files={".pi/agent/models.json": json.dumps({"providers": {"ramify": provider}}, indent=2)},
        run="pi --provider ramify --model local -p PROMPT",
        resume="pi --provider ramify --model local --continue -p PROMPT",
    )


def _cline(api: str, provider: str, base: str) -> Client:
    return Client(
        agent="Cline",
        package="cline",
        executable="node_modules/.bin/cline",
        api=api,
        tool="run_commands",
        arguments={"commands": [COMMAND]},
        setup=f"cline auth {provider} --apikey none --modelid local --baseurl {base}",
        run="cline PROMPT",
        resume="cline --id SESSION",
        terminal=True,
        sessions=".cline/data/sessions/*",
    )


def _continue(api: str, provider: str) -> Client:
    config = f"""\
name: local
version: 0.0.1
schema: v1
models:
  - name: local
    provider: {provider}
    model: {MODEL}
    apiBase: {URL}/v1
    apiKey: none
"""
    return Client(
        agent="Continue",
        package="@continuedev/cli",
        executable="node_modules/.bin/cn",
        api=api,
        tool="Bash",
        files={".continue/config.yaml": config},
        run="cn --config ~/.continue/config.yaml --auto -p PROMPT",
        resume="cn --config ~/.continue/config.yaml --auto --resume -p PROMPT",
    )


AIDER = """\
- name: PROVIDER/local
  edit_format: diff
  reminder: none
"""


def _aider(api: str, provider: str, env: dict[str, str]) -> Client:
    quiet = "--no-git --no-analytics --no-show-model-warnings --no-show-release-notes"
    options = f"{quiet} --model {provider}/local"
    return Client(
        agent="Aider",
        package="aider",
        executable="bin/aider",
        api=api,
        tool="",
        files={".aider.model.settings.yml": AIDER.replace("PROVIDER", provider)},
        env=env,
        run=f"aider {options}",
        shares=(0.95, 0.9, 0.95),
        note="Resumed sessions leave out outputs of commands.",
        replies="y\ny\nWhat did that print?\n",
        resume=f"aider {options} --restore-chat-history --message PROMPT",
    )


CLIENTS = [
    Client(
        agent="Codex",
        package="@openai/codex",
        executable="node_modules/.bin/codex",
        api=RESPONSES,
        tool="exec_command",
        arguments={"cmd": COMMAND},
        files={".codex/config.toml": CODEX},
        run=f"codex exec {CODEX_OPTIONS} PROMPT",
        resume=f"codex exec resume --last {CODEX_OPTIONS} PROMPT",
    ),
    Client(
        agent="Claude Code",
        package="@anthropic-ai/claude-code",
        executable="node_modules/@anthropic-ai/claude-code-*/claude",
        api=MESSAGES,
        tool="Bash",
        env={"ANTHROPIC_BASE_URL": URL, "ANTHROPIC_AUTH_TOKEN": "none", "ANTHROPIC_MODEL": MODEL},
        run="claude --allowedTools Bash -p PROMPT",
        resume="claude --allowedTools Bash --continue -p PROMPT",
    ),
    _opencode(CHAT, "@ai-sdk/openai-compatible"),
    _opencode(RESPONSES, "@ai-sdk/openai"),
    _opencode(MESSAGES, "@ai-sdk/anthropic"),
    _qwen(CHAT, {"OPENAI_BASE_URL": URL + "/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": MODEL}),
    _qwen(MESSAGES, {"ANTHROPIC_BASE_URL": URL, "ANTHROPIC_API_KEY": "none", "ANTHROPIC_MODEL": MODEL}),
    _copilot(CHAT, {}),
    _copilot(RESPONSES, {"COPILOT_PROVIDER_WIRE_API": "responses"}),
    _copilot(MESSAGES, {"COPILOT_PROVIDER_TYPE": "anthropic", "COPILOT_PROVIDER_BASE_URL": URL}),
    _pi(CHAT, "openai-completions"),
    _pi(RESPONSES, "openai-responses"),
    _pi(MESSAGES, "anthropic-messages"),
    _cline(CHAT, "openai", URL + "/v1"),
    _cline(RESPONSES, "openai-native", URL + "/v1"),
    _continue(CHAT, "openai"),
    _continue(MESSAGES, "anthropic"),
    _aider(CHAT, "openai", {"OPENAI_API_BASE": URL + "/v1", "OPENAI_API_KEY": "none"}),
    _aider(MESSAGES, "anthropic", {"ANTHROPIC_API_BASE": URL, "ANTHROPIC_API_KEY": "none"}),
    _aider(OLLAMA, "ollama_chat", {"OLLAMA_API_BASE": URL}),
]
