"""The display of a running program: updated in place in a notebook, printed as text elsewhere."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import TimeoutError
from typing import TYPE_CHECKING, Any

from ramify.lang.state.state_html import state_html
from ramify.lang.trace.html import usage_lines
from ramify.loop import SIGNAL_CHECK_S

if TYPE_CHECKING:
    from ramify.lang.state.state import ProgramState

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
    """Display the state, and update the display after changes until all steps are done."""
    from IPython.display import display

    shown: Any = None
    for _ in _changes(state):
        shown_as = {"text/html": state_html(state), "text/plain": repr(state)}
        if shown is None:
            shown = display(shown_as, raw=True, display_id=True)
        else:
            shown.update(shown_as, raw=True)


def _write(state: ProgramState) -> None:
    """Print the text while it is generated, then the error and the usage."""
    branch, written = state._branch, 0
    for _ in _changes(state):
        texts = branch.feed[written:] if branch.run.stream else []
        written += len(texts)
        print("".join(texts), end="", flush=True)
    error = branch.error or branch.run.error
    rest = [] if branch.run.stream else [branch.text]
    print(*rest, *([] if error is None else [f"failed: {error}"]), *usage_lines(branch.call), sep="\n")


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
