"""`ramify chat`: a conversation in the terminal. /exit or the end of the input ends it."""

from __future__ import annotations

import argparse
import itertools
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, cast

from ramify.cli.flags import add_model
from ramify.cli.target import add_target_flags, engine_of, first_model
from ramify.loop import wait
from ramify.messages import ChatMessage, Generate, ModelInfo, Usage
from ramify.sampling_params import SamplingParams
from ramify.tool_calls.channels import ChannelParser
from ramify.tool_calls.parser import Content

if TYPE_CHECKING:
    from ramify.lang.backends.base import Backend


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system prompt")
    parser.add_argument(
        "--max-tokens", type=int, default=512, metavar="N", help="tokens of an answer (default: 512)"
    )
    parser.add_argument("--temperature", type=float, default=0.7, metavar="X", help="(default: 0.7)")
    add_target_flags(parser)


def run_command(options: argparse.Namespace) -> int:
    sampling = SamplingParams(max_tokens=options.max_tokens, temperature=options.temperature).check()
    engine = engine_of(options)
    if engine is not None:
        with engine:
            _converse(engine, sampling, options.system)
        return 0
    _converse(wait(_connect(options.endpoint, options.endpoint_key)), sampling, options.system)
    return 0


async def _connect(url: str, api_key: str | None) -> Backend:
    """A backend for the first model that the server lists. The server may be any with OpenAI's API."""
    from ramify.lang.backends.openai import OpenAI

    base_url = url.rstrip("/").removesuffix("/v1") + "/v1"
    return OpenAI(await first_model(base_url, api_key), base_url=base_url, api_key=api_key)


def _converse(backend: Backend, sampling: SamplingParams, system: str | None) -> None:
    turns = [ChatMessage(role="system", content=system)] if system else []
    for number in itertools.count():
        try:
            said = input("> ").strip()
        except EOFError:
            print()
            return
        if said == "/exit":
            return
        if not said:
            continue
        turns.append(ChatMessage(role="user", content=said))
        request = Generate(rid=f"chat-{number}", chat=tuple(turns), sampling=sampling)
        turns.append(ChatMessage(role="assistant", content=wait(_print_answer(backend, request))))


def _channels_of(info: ModelInfo) -> ChannelParser | None:
    """A parser that separates thoughts from answers, for a model that writes thoughts in channels, so that
    later turns have none; None for other models."""
    thinking = None if info.chat_format is None else info.chat_format.thinking
    return ChannelParser(calls=False) if thinking is not None and thinking.channels else None


async def _print_answer(backend: Backend, request: Generate) -> str:
    """Stream the answer to the terminal, then print its usage; returns the text."""
    started = time.perf_counter()
    text, usage = "", Usage()
    channels = _channels_of(await backend.info())
    async with aclosing(cast("Any", backend.generate(request))) as chunks:
        async for chunk in chunks:
            pieces: list[Any] = [Content(chunk.text)]
            if channels is not None:
                pieces = channels.push(chunk.text, chunk.controls)
                pieces += channels.close() if chunk.finish is not None else []
            for piece in pieces:
                if isinstance(piece, Content) and channels is not None and not text:
                    print("\n")  # between thoughts and answer
                print(piece.text, end="", flush=True)
                text += piece.text if isinstance(piece, Content) else ""
            usage = chunk.usage or usage
    seconds = time.perf_counter() - started
    print(
        f"\n[prompt {usage.prompt_tokens}, of these cached {usage.cached_tokens}; "
        f"answer {usage.completion_tokens}; {seconds:.1f} s]"
    )
    return text
