"""Control calls: messages that one replica answers, or that all replicas answer, with the answers merged."""

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
from ramify.runtime.fleet.replica import SILENT_S, Later, Replica, Timer
from ramify.runtime.fleet.stats import merged

log = logging.getLogger("ramify")

Answer = Reply | Texts | Failed

ADAPTER_S = 120.0
"""Time limit of a call about an adapter, in seconds. A replica that hangs is replaced sooner. The limit is
for a replica that answers heartbeats while the disk with the adapter's files does not respond."""
MOST_DEATHS = 2
"""Number of times that a replica may die before it answers a call. With one more death the call fails, as the
call itself may be the cause."""


@dataclasses.dataclass(slots=True, eq=False)
class _Call:
    """A call that the replicas in `waiting` have to answer. If no replica was up, `waiting` is empty, and the
    next replica that joins is asked."""

    message: ToTokenizer
    done: Callable[[Answer], None]
    waiting: set[str] = dataclasses.field(default_factory=set)
    answers: dict[str, Answer] = dataclasses.field(default_factory=dict)
    deaths: int = 0
    timer: Timer | None = None


class ControlCalls:
    """Control calls that have not been answered.

    replicas : the fleet's replicas by name; the caller adds and removes entries
    labelled : whether counters are a `FleetStats` (counters by replica), even for a single replica
    later : schedules a function to run after a number of seconds; None for `call_later` of the running loop
    """

    def __init__(
        self, replicas: Mapping[str, Replica], *, labelled: bool = True, later: Later | None = None
    ) -> None:
        self._replicas = replicas
        self._labelled = labelled
        self._later = later
        self._asked: dict[str, _Call] = {}
        self._turns = itertools.count()

    def ask(self, message: ToTokenizer, done: Callable[[Answer], None]) -> None:
        """Send `message`, and call `done` with the answer of one replica, or the merged answer of all. If the
        message cannot be sent to a replica, a `Failed` counts as that replica's answer."""
        call = _Call(message, done)
        self._ask(call)
        if isinstance(message, LoadLora | UnloadLora) and self._asked.get(message.rid) is call:
            later = self._later or asyncio.get_running_loop().call_later
            call.timer = later(ADAPTER_S, lambda: self._give_up(call))

    def answered(self, name: str, answer: Answer) -> None:
        call = self._asked.get(answer.rid)
        if call is not None and name in call.waiting:
            call.waiting.discard(name)
            call.answers[name] = answer
            self._finish(call)

    def joined(self, name: str) -> None:
        """Send waiting calls to a replica that has come up without adapters: calls that arrived while no
        replica was up, and every `LoadLora`."""
        for call in list(self._asked.values()):
            if not call.waiting:
                self._ask(call)
            elif isinstance(call.message, LoadLora):
                call.waiting.add(name)
                self._send(call, [name])

    def left(self, name: str, *, died: bool) -> None:
        """Stop waiting for the replica `name`. A call that waited only for `name` goes to another replica."""
        for call in list(self._asked.values()):
            if name in call.waiting:
                call.waiting.discard(name)
                call.deaths += died
                self._finish(call)

    def waiting_for(self, name: str) -> list[str]:
        """Ids of the calls that the replica has not answered."""
        return [rid for rid, call in self._asked.items() if name in call.waiting]

    def forget(self, rid: str) -> None:
        call = self._asked.pop(rid, None)
        if call is not None and call.timer is not None:
            call.timer.cancel()

    def clear(self) -> None:
        for rid in list(self._asked):
            self.forget(rid)

    def _ask(self, call: _Call) -> None:
        self._asked[_rid(call.message)] = call
        call.waiting = set(self._for(call.message))
        self._send(call, list(call.waiting))

    def _send(self, call: _Call, names: Sequence[str]) -> None:
        for name in names:
            try:
                self._replicas[name].engine.send(call.message)
            except Exception as error:
                log.exception("a control call could not be sent to replica %s", name)
                call.waiting.discard(name)
                info = unsendable(error).to_info()
                call.answers[name] = Failed(rid=_rid(call.message), error=info)
        if call.answers:
            self._finish(call)

    def _for(self, message: ToTokenizer) -> Sequence[str]:
        """The replicas that have to answer `message`; empty if none is up."""
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
        return [name for name in names if self._replicas[name].engine.heartbeat_age_s < SILENT_S] or names

    def _finish(self, call: _Call) -> None:
        """Pass on the answer once no replica is waited for. If there is no answer, as all asked replicas are
        gone, ask again."""
        if call.waiting:
            return
        message = call.message
        if not call.answers and call.deaths <= MOST_DEATHS:
            self._ask(call)
            return
        self.forget(_rid(message))
        try:
            answer = self._answer(call)
        except Exception as error:
            log.exception("answers could not be merged")
            answer = Failed(rid=_rid(message), error=unsendable(error).to_info())
        with errors_logged("taking an answer"):
            call.done(answer)

    def _give_up(self, call: _Call) -> None:
        """End a call whose time limit has passed. A missing answer counts as a failure. After a `LoadLora`,
        late replicas are told to unload the adapter."""
        message = call.message
        late, call.waiting = call.waiting, set()
        names = ", ".join(sorted(late))
        within = f"within {ADAPTER_S:g} s"
        text = (
            f"Replicas that have not answered {within}: {names}." if late else f"No replica came up {within}."
        )
        failed = Failed(rid=_rid(message), error=EngineError(text).to_info())
        for name in late:
            call.answers[name] = failed
            if isinstance(message, LoadLora):
                with errors_logged("unloading an adapter"):
                    self._replicas[name].engine.send(UnloadLora(rid="", name=message.name))
        if not late:
            call.answers[""] = failed
        self._finish(call)

    def _answer(self, call: _Call) -> Answer:
        message = call.message
        if not call.answers:
            error = WorkerDied(f"Replicas died {call.deaths} times over this.", transient=False)
            return Failed(rid=_rid(message), error=error.to_info())
        if isinstance(message, LoadLora):
            return self._loaded(message, call.answers)
        if isinstance(message, UnloadLora):
            for replica in self._replicas.values():
                replica.loras.pop(message.name, None)
        return self._merged(call.answers)

    def _loaded(self, message: LoadLora, answers: dict[str, Answer]) -> Answer:
        """The merged answer to the `LoadLora` `message`. If loading failed on a replica, or the replicas have
        loaded different revisions, all replicas unload the adapter."""
        own = {name: replica.loras for name, replica in self._replicas.items() if replica.up}
        if all(message.name in own.get(name, ()) for name in answers):
            return self._merged(answers)  # it was loaded before: each replica has refused it
        for name, answer in answers.items():
            if isinstance(answer, Reply) and name in own:
                own[name][message.name] = answer.lora
        answer = self._merged(answers)
        revisions = {loras[message.name] for loras in own.values() if message.name in loras}
        if len(revisions) > 1:
            changed = InvalidRequest(f"The files of {message.name} have changed.", remedy="Load it again.")
            answer = Failed(rid=message.rid, error=changed.to_info())
        if isinstance(answer, Failed):
            for name, loras in own.items():
                if loras.pop(message.name, None) is not None:
                    self._replicas[name].engine.send(UnloadLora(rid="", name=message.name))
        return answer

    def _merged(self, answers: dict[str, Answer]) -> Answer:
        replies = {name: answer for name, answer in answers.items() if isinstance(answer, Reply)}
        if len(replies) < len(answers):
            return next(answer for answer in answers.values() if not isinstance(answer, Reply))
        if not self._labelled:
            return next(iter(replies.values()))
        return merged(replies, {name: replica.state for name, replica in self._replicas.items()})


def _rid(message: ToTokenizer) -> str:
    return str(getattr(message, "rid", ""))
