"""Questions to the replicas: each goes to one of them or to all, whose answers become one."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence

from ramify.engine_messages import (
    Detokenize,
    Failed,
    LoadLora,
    Reply,
    Texts,
    Tokenize,
    ToTokenizer,
    UnloadLora,
)
from ramify.errors import EngineError, InvalidRequest, WorkerDied
from ramify.runtime.faults import errors_logged, unsendable
from ramify.runtime.fleet.replica import SILENT_S, Later, Replica, State, Timer
from ramify.runtime.fleet.stats import merged

log = logging.getLogger("ramify")

Answer = Reply | Texts | Failed

ADAPTER_S = 120.0
"""A question about an adapter that has not been answered by all for this long fails. A replica that hangs is
replaced before; this is for one that answers heartbeats, and whose files' disk does not."""
MOST_DEATHS = 2
"""A question that was asked of more replicas that died than this fails: it may be what kills them."""


@dataclasses.dataclass(slots=True, eq=False)
class _ControlCall:
    """A message to be answered by the replicas in `waiting`; by any that joins where none was up."""

    message: ToTokenizer
    done: Callable[[Answer], None]
    waiting: set[str] = dataclasses.field(default_factory=set)
    answers: dict[str, Answer] = dataclasses.field(default_factory=dict)
    deaths: int = 0
    timer: Timer | None = None


class ControlCalls:
    """What has been asked and not answered.

    replicas : those of the fleet, by name, now
    later : calls a function after a number of seconds, unless it is cancelled; None for the running loop's
    """

    def __init__(self, replicas: Mapping[str, Replica], later: Later | None = None) -> None:
        self._replicas = replicas
        self.later = later
        self._asked: dict[str, _ControlCall] = {}
        self._turns = itertools.count()

    def ask(self, message: ToTokenizer, done: Callable[[Answer], None]) -> None:
        """`done` gets the answer, those of several replicas merged; a `Failed` where it cannot be sent."""
        question = _ControlCall(message, done)
        self._ask(question)
        if isinstance(message, LoadLora | UnloadLora) and self._asked.get(message.rid) is question:
            later = self.later or asyncio.get_running_loop().call_later
            question.timer = later(ADAPTER_S, lambda: self._give_up(question))

    def answered(self, name: str, answer: Answer) -> None:
        question = self._asked.get(answer.rid)
        if question is not None and name in question.waiting:
            question.waiting.discard(name)
            question.answers[name] = answer
            self._finish(question)

    def joined(self, name: str) -> None:
        """A replica is up, without adapters: it is asked what waits for one."""
        for question in list(self._asked.values()):
            if not question.waiting:
                self._ask(question)
            elif isinstance(question.message, LoadLora):
                question.waiting.add(name)
                self._send(question, [name])

    def left(self, name: str, *, died: bool) -> None:
        """A replica is not up any more. Where nobody else was asked, another one is."""
        for question in list(self._asked.values()):
            if name in question.waiting:
                question.waiting.discard(name)
                question.deaths += died
                self._finish(question)

    def waiting_for(self, name: str) -> list[str]:
        """The ids of the questions that the replica has not answered."""
        return [rid for rid, question in self._asked.items() if name in question.waiting]

    def forget(self, rid: str) -> None:
        question = self._asked.pop(rid, None)
        if question is not None and question.timer is not None:
            question.timer.cancel()

    def clear(self) -> None:
        for rid in list(self._asked):
            self.forget(rid)

    # --- internals --------------------------------------------------------------------------------

    def _ask(self, question: _ControlCall) -> None:
        self._asked[_rid(question.message)] = question
        question.waiting = set(self._for(question.message))
        self._send(question, list(question.waiting))

    def _send(self, question: _ControlCall, names: Sequence[str]) -> None:
        """Where sending fails, that is the replica's answer."""
        for name in names:
            try:
                self._replicas[name].engine.send(question.message)
            except Exception as error:
                log.exception("a question could not be sent to replica %s", name)
                question.waiting.discard(name)
                info = unsendable(error).to_info()
                question.answers[name] = Failed(rid=_rid(question.message), error=info)
        if question.answers:
            self._finish(question)

    def _for(self, message: ToTokenizer) -> Sequence[str]:
        """The replicas that have to answer."""
        up = [name for name, replica in self._replicas.items() if replica.up]
        if not up:
            return ()
        if isinstance(message, Tokenize | Detokenize):
            heard = self._heard(up)
            usable = [name for name in heard if self._replicas[name].usable] or heard
            return (usable[next(self._turns) % len(usable)],)
        if isinstance(message, LoadLora):
            return [name for name in up if message.name not in self._replicas[name].loras] or up
        if isinstance(message, UnloadLora):
            return up
        return self._heard(up)

    def _heard(self, names: list[str]) -> list[str]:
        """The replicas that do not hang; all where all do."""
        return [name for name in names if self._replicas[name].engine.heartbeat_age_s < SILENT_S] or names

    def _finish(self, question: _ControlCall) -> None:
        """Give the answer if all have answered; ask again where all who were asked are gone."""
        if question.waiting:
            return
        message = question.message
        if not question.answers and question.deaths <= MOST_DEATHS:
            self._ask(question)
            return
        self.forget(_rid(message))
        try:
            answer = self._answer(question)
        except Exception as error:
            log.exception("answers could not be merged")
            answer = Failed(rid=_rid(message), error=unsendable(error).to_info())
        with errors_logged("taking an answer"):
            question.done(answer)

    def _give_up(self, question: _ControlCall) -> None:
        """The time is over: those that have not answered fail, and forget the adapter once they have it."""
        message = question.message
        late, question.waiting = question.waiting, set()
        names = ", ".join(sorted(late))
        within = f"within {ADAPTER_S:g} s"
        text = (
            f"Replicas that have not answered {within}: {names}." if late else f"No replica came up {within}."
        )
        failed = Failed(rid=_rid(message), error=EngineError(text).to_info())
        for name in late:
            question.answers[name] = failed
            if isinstance(message, LoadLora):
                with errors_logged("unloading an adapter"):
                    self._replicas[name].engine.send(UnloadLora(rid="", name=message.name))
        if not late:
            question.answers[""] = failed
        self._finish(question)

    def _answer(self, question: _ControlCall) -> Answer:
        message = question.message
        if not question.answers:
            error = WorkerDied(f"Replicas died {question.deaths} times over this.", transient=False)
            return Failed(rid=_rid(message), error=error.to_info())
        if isinstance(message, LoadLora):
            return self._loaded(message, question.answers)
        if isinstance(message, UnloadLora):
            for replica in self._replicas.values():
                replica.loras.pop(message.name, None)
        return _merged(question.answers, self._states())

    def _loaded(self, message: LoadLora, answers: dict[str, Answer]) -> Answer:
        """The answer to a `LoadLora`. Where not all replicas have the same adapter then, none keeps it."""
        own = {name: replica.loras for name, replica in self._replicas.items() if replica.up}
        if all(message.name in own.get(name, ()) for name in answers):
            return _merged(answers, self._states())  # it was there before: each has refused it
        for name, answer in answers.items():
            if isinstance(answer, Reply) and name in own:
                own[name][message.name] = answer.lora
        answer = _merged(answers, self._states())
        revisions = {loras[message.name] for loras in own.values() if message.name in loras}
        if len(revisions) > 1:
            changed = InvalidRequest(f"The files of {message.name} have changed.", remedy="Load it again.")
            answer = Failed(rid=message.rid, error=changed.to_info())
        if isinstance(answer, Failed):
            for name, loras in own.items():
                if loras.pop(message.name, None) is not None:
                    self._replicas[name].engine.send(UnloadLora(rid="", name=message.name))
        return answer

    def _states(self) -> dict[str, State]:
        return {name: replica.state for name, replica in self._replicas.items()}


def _rid(message: ToTokenizer) -> str:
    return str(getattr(message, "rid", ""))


def _merged(answers: dict[str, Answer], states: Mapping[str, State]) -> Answer:
    """One answer of those of all that were asked: the first failure if there is one."""
    for answer in answers.values():
        if not isinstance(answer, Reply):
            return answer
    return merged({name: answer for name, answer in answers.items() if isinstance(answer, Reply)}, states)
