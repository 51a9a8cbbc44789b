"""A chat of several turns, streamed, in an async program.

Each turn continues from the very tokens of the turns before, so only new tokens are computed.

python examples/chat.py
"""

from __future__ import annotations

import asyncio

import ramify as rm

QUESTIONS = (
    "What is a radix tree, in one sentence?",
    "Name one use of it.",
    "Say that again in five words.",
)


@rm.function
async def chat(s: rm.ProgramState, questions: tuple[str, ...]) -> None:
    s += rm.system("You are a helpful assistant. Keep it short.")
    for number, question in enumerate(questions):
        s += rm.user(question)
        s += rm.assistant(rm.gen(f"answer {number}", max_tokens=64, temperature=0.0))


async def talk(backend: rm.Backend) -> rm.ProgramState:
    state = await chat.run(QUESTIONS, backend=backend, stream=True)
    for number, question in enumerate(QUESTIONS):
        print(f"\n> {question}")
        async for piece in state.text_async_iter(f"answer {number}"):
            print(piece, end="", flush=True)
        print()
    await state.wait()
    return state


def main(backend: rm.Backend | None = None) -> rm.ProgramState:
    state = asyncio.run(talk(backend or rm.Engine()))
    print("\nprompt tokens of each turn:")
    for turn in state.trace.children:
        print(f"  {turn.usage.prompt_tokens:4} of which {turn.computed_tokens} computed")
    return state


if __name__ == "__main__":
    main()
