"""The display of a program: HTML in a notebook, updated while the program runs; text elsewhere."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import TimeoutError
from typing import TYPE_CHECKING, Any

from ramify.html.fragment import Run, details, escaped, fragment, head, table, tag, text
from ramify.lang.calls.tool_turns import CallTurn, Describe
from ramify.lang.program.branch import Branch
from ramify.lang.program.variables import Skipped, Variable
from ramify.lang.prompt.chat import Begin, End, Thought
from ramify.lang.prompt.transcript import Generated, Piece, pieces
from ramify.lang.state.streaming import BranchText
from ramify.lang.trace.html import model_names, usage_html, usage_lines
from ramify.loop import SIGNAL_CHECK_S

if TYPE_CHECKING:
    from ramify.lang.state.state import ProgramState

MAX_TURNS = 40
"""Most turns of a branch that are shown. For earlier turns only their number is shown."""
MAX_BRANCHES = 16
MAX_VARIABLES = 50
MAX_VALUE = 500
"""Most characters of a variable's value that are shown."""


def state_html(state: ProgramState) -> str:
    """HTML of a state: the turns with their generated parts marked, the variables, the error and the
    usage."""
    branch, run = state._branch, state._branch.run
    error = branch.error or run.error
    parts = [head(run.root.call.name, state._status, *model_names(branch.call)), *_content(branch)]
    if error is not None:
        parts.append(_error(str(error), error.line, error.partial))
    if branch.variables:
        parts.append(details("Variables", _variables(dict(branch.variables)), open=True))
    for value in state._returned:
        if value is not None and not isinstance(value, type(state)):
            parts.append(table([("returned", tag("code", escaped(_repr(value), MAX_VALUE)))]))
    parts.append(usage_html(branch.call))
    return fragment(parts)


def _content(branch: Branch, since: Piece | None = None) -> Iterator[str]:
    """HTML parts: the turns and texts of a branch after `since`, then the branches forked from it."""
    turns = [*_turns(branch, since)]
    if len(turns) > MAX_TURNS:
        yield tag("div", f"{len(turns) - MAX_TURNS} earlier turns", "soft")
    yield from turns[-MAX_TURNS:]
    for child in branch.children[:MAX_BRANCHES]:
        yield details(child.call.name, "".join(_content(child, child.fork_point)))
    if len(branch.children) > MAX_BRANCHES:
        yield tag("div", f"{len(branch.children) - MAX_BRANCHES} more branches", "soft")


def _turns(branch: Branch, since: Piece | None) -> Iterator[str]:
    dialogue = branch.content.dialogue
    role = dialogue.role if dialogue.start is since and since is not None else None
    runs: list[Run] = []
    thoughts: list[str] = []
    for piece in pieces(branch.content.tail, since):
        match piece.mark:
            case Begin(role=begun):
                yield from _turn(role, runs)
                role, runs = begun, []
            case End():
                yield from _turn(role, runs, thoughts)
                role, runs, thoughts = None, [], []
            case Thought() as thought:
                thoughts += [thought.thoughts] if thought.thoughts else []
                runs.append((thought.head, True))
            case CallTurn() as turn:
                yield from _turn(role, runs)
                runs = []
                yield _call_turn(turn)
            case Describe() as described:
                names = ", ".join(tool.name for tool in described.tools)
                runs.append((f"\n[tools: {names}]" if runs else f"[tools: {names}]", False))
            case None | Generated():
                runs.append((piece.text, piece.generated))
    if (variable := branch.running) is not None:
        runs += [(chunk.text, True) for chunk in list(variable.chunks)]
    yield from _turn(role, runs, thoughts)


def _turn(role: str | None, runs: list[Run], thoughts: Sequence[str] = ()) -> Iterator[str]:
    folded = "".join(details("thoughts", text([(thought, True)])) for thought in thoughts)
    if role is not None:
        yield tag("div", tag("span", escaped(role), "role") + folded + text(runs), f"turn {role}")
        return
    if folded:
        yield folded
    if any(part.strip() for part, _ in runs):
        yield text(runs)


def _call_turn(turn: CallTurn) -> str:
    rows = [
        (tag("code", tag("mark", escaped(f"{name}({arguments})"))), escaped(shown))
        for (name, arguments), shown in zip(turn.written, turn.shown, strict=True)
    ]
    said = text([(turn.words, True)]) if turn.words else ""
    called = table(rows, ("call", "result")) if rows else ""
    return tag("div", tag("span", "assistant", "role") + said + called, "turn assistant")


def _variables(variables: dict[str, Variable]) -> str:
    rows = [(tag("code", escaped(name)), _value(variable)) for name, variable in variables.items()]
    left = len(rows) - MAX_VARIABLES
    more = tag("div", f"{left} more", "soft") if left > 0 else ""
    return table(rows[:MAX_VARIABLES]) + more


def _value(variable: Variable) -> str:
    if not variable.ready.is_set():
        return tag("span", "not set yet", "soft")
    if variable.error is not None:
        return tag("span", "skipped" if isinstance(variable.error, Skipped) else "failed", "soft")
    return tag("code", escaped(_repr(variable.value), MAX_VALUE))


def _repr(value: Any) -> str:
    try:
        return repr(value)
    except Exception as error:
        return f"<{type(value).__name__}, whose repr raised {type(error).__name__}>"


def _error(message: str, line: str | None, partial: str | None) -> str:
    where = tag("div", tag("code", escaped(line)), "soft") if line and line not in message else ""
    rest = details("partial output", text([(partial, True)])) if partial else ""
    return tag("div", escaped(message) + where + rest, "bad")


EVERY_S = 0.1
"""Shortest time between two updates, in seconds."""


def in_notebook() -> bool:
    """Whether this process runs the code of a notebook. Does not import IPython."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and type(shell).__name__ != "TerminalInteractiveShell"


def show(state: ProgramState) -> None:
    """The implementation of `ProgramState.show`."""
    run = state._branch.run
    if run.asynchronous and not run.finished.is_set():
        follow(state)
        return
    try:
        _view(state)
    except BaseException:  # Ctrl-C
        state.cancel()
        raise


def follow(state: ProgramState) -> None:
    """Show `state` from a new thread. Returns at once."""
    threading.Thread(target=_view, args=(state,), name="ramify-view", daemon=True).start()


def _view(state: ProgramState) -> None:
    if in_notebook():
        _update(state)
    else:
        _write(state)


def _update(state: ProgramState) -> None:
    from IPython.display import display

    shown: Any = None
    for _ in _changes(state):
        shown_as = {"text/html": state_html(state), "text/plain": repr(state)}
        if shown is None:
            shown = display(shown_as, raw=True, display_id=True)
        else:
            shown.update(shown_as, raw=True)


def _write(state: ProgramState) -> None:
    branch, source, end = state._branch, BranchText(state), "\n"
    for _ in _changes(state):
        for added, _meta in source.new():
            print(added, end="", flush=True)
            end = added[-1]
    error = branch.error or branch.run.error
    if end != "\n":
        print()
    print(*([] if error is None else [f"failed: {error}"]), *usage_lines(branch.call), sep="\n")


def _changes(state: ProgramState) -> Iterator[None]:
    """Yield at once, then after changes of the run, and for the last time when all steps so far are done."""
    done, changed = state._all_done(), threading.Event()
    done.on_set(changed.set)
    with state._branch.run.listening(changed.set):
        while not done.is_set():
            changed.clear()
            yield
            while not changed.wait(SIGNAL_CHECK_S):
                pass
            with contextlib.suppress(TimeoutError):
                done.result(EVERY_S)
    yield
