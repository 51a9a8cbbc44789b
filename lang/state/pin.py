"""Pins: prefixes that stay in a backend's cache after the program that wrote them."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import uuid
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from ramify.errors import InvalidRequest, UnsupportedNode
from ramify.lang.backends.base import Backend
from ramify.lang.calls import request
from ramify.lang.calls.limits import allow_call
from ramify.lang.program.sending import lora_of
from ramify.lang.prompt.transcript import prompt_of
from ramify.lang.state.state import ProgramState
from ramify.loop import in_background, submit, wait
from ramify.messages import Generate, ProgramHint
from ramify.sampling_params import SamplingParams

T = TypeVar("T")

PIN_S = 3600.0
"""Seconds of a pin that names none."""


class Pin:
    """A prefix that a backend keeps until `seconds` after the pin was made, or until `release`. As a ``with``
    or ``async with`` block, the pin is released at the end of the block."""

    def __init__(self, backend: Backend, owner: str, tokens: int, seconds: float) -> None:
        self._backend = backend
        self.owner = owner
        """The pin's name in `Engine.cache` and GET /cache."""
        self.tokens = tokens
        """Number of tokens that are held."""
        self.seconds = seconds

    def release(self) -> None:
        """Let the backend evict the tokens again. A second call does nothing."""
        wait(self._backend.end_program(self.owner))

    async def arelease(self) -> None:
        """Do as `release`, from a coroutine on any event loop."""
        await _in_background(self._backend.end_program(self.owner))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.arelease()

    def __repr__(self) -> str:
        return f"<Pin {self.owner}: {self.tokens} tokens for {self.seconds:g} s>"


def pin(state: ProgramState, seconds: float = PIN_S) -> Pin:
    """Keep the transcript of `state` so far in the backend's prefix cache for `seconds`.

        state = instructions.run(text=manual)
        with rm.pin(state, seconds=8 * 3600) as held:
            answers = ask.run_batch(questions)      # their prompts begin with the transcript

    Waits for the steps so far, and computes what is not in the cache yet. The tokens are not evicted for
    other requests, although the program ends, until the time is over or the pin is released. They are lost if
    the engine restarts. `state` may be a running state, a branch of a fork, or the state that `run` has
    returned. The transcript is that for the run's own backend. The request counts towards the limits of the
    run, and is the call "pin" in its trace.

    Pins together hold at most `max_pinned_share` of the engine's KV pages. One request that runs alone and
    does not fit beside them makes them ordinary leases, the pin that ends first before others.

    Raises `InvalidRequest` if pins would hold more, with the numbers; `UnsupportedNode` for a backend that
    cannot pin; the `ProgramError` of a step that has failed; RuntimeError in an async program, which awaits
    `apin`.
    """
    backend = _checked(state, seconds)
    state._branch.run.check_may_block()
    state.sync()
    return wait(_pin(state, backend, seconds))


async def apin(state: ProgramState, seconds: float = PIN_S) -> Pin:
    """Do as `pin`, for async programs."""
    backend = _checked(state, seconds)
    await state.wait()
    return await _in_background(_pin(state, backend, seconds))


def _checked(state: ProgramState, seconds: float) -> Backend:
    """The backend that keeps the pin."""
    if not 0 < seconds < math.inf:
        raise InvalidRequest(f"seconds is {seconds}; it must be above 0 and finite.", field="seconds")
    backend = state._branch.run.own_backend
    if not getattr(backend, "pins", False):
        raise UnsupportedNode(
            f"{type(backend).__name__} cannot pin: it keeps no prefix cache for its programs.",
            field="pin",
            remedy="Run the program on rm.Engine or rm.RuntimeEndpoint.",
        )
    return backend


async def _pin(state: ProgramState, backend: Backend, seconds: float) -> Pin:
    state._raise()
    branch = state._branch
    run, owner = branch.run, f"pin-{uuid.uuid4().hex[:16]}"
    view = branch.view(run.home)
    segments = prompt_of(view.content.tail, view.prompt).segments
    if not segments:
        raise InvalidRequest("The state is empty: there is nothing to pin.", field="state")
    sampling = SamplingParams(max_tokens=0, token_healing=False)
    call = branch.call.child("gen", "pin", view.content.tail, run.clock())
    made = Generate(
        rid=run.next_rid(),
        prompt=segments,
        sampling=sampling,
        hint=ProgramHint(
            program=owner,
            name=run.root.call.name,
            lease_s=seconds,
            path=call.path,
            session=True,
            pinned=True,
        ),
        scope=run.scope,
        priority=run.options.get("priority", run.home.priority),
        lora=lora_of(branch, call, run.home),
    )
    allowance = allow_call(branch.limits, sampling)
    target = dataclasses.replace(run.home, backend=backend)
    try:
        output = await request.send(run, target, call, made, allowance)
    except asyncio.CancelledError:
        await backend.end_program(owner)  # the request may have ended before it was aborted
        raise
    except Exception as error:
        call.error = str(error)
        raise
    return Pin(backend, owner, output.usage.prompt_tokens, seconds)


async def _in_background(work: Coroutine[Any, Any, T]) -> T:
    return await (work if in_background() else asyncio.wrap_future(submit(work)))
