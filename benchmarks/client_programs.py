"""The ten programs of `tests.lang.programs` as one writes them for an OpenAI-compatible endpoint.

Each program asks for the same texts with the same prompts. Requests that do not depend on another answer are
sent at once. A select is one request constrained to the choices. The API cannot score every choice for a
chat; a constrained request is cheaper than scoring, but may give another choice.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from tests.lang.programs.branching import DIMENSIONS, REPLIES, Score
from tests.lang.programs.structured import CHARACTER_REGEX, look_up

Messages = list[dict[str, str]]


class Ask(Protocol):
    """A function that sends a request. `prompt` is a text to continue, or the messages of a conversation."""

    async def __call__(
        self,
        name: str,
        prompt: str | Messages,
        *,
        max_tokens: int = ...,
        stop: str | Sequence[str] = ...,
        regex: str | None = ...,
        schema: Any = ...,
        choices: Sequence[str] = ...,
    ) -> str: ...


def system(content: str) -> dict[str, str]:
    return {"role": "system", "content": content}


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


async def few_shot(ask: Ask, question: str) -> None:
    prompt = "Answer each question with one short fact.\n\n"
    prompt += "Q: Which metal is liquid at room temperature?\nA: Mercury.\n\n"
    prompt += "Q: How many strings does a violin have?\nA: Four.\n\n"
    prompt += "Q: Which planet has the shortest year?\nA: Mercury.\n\n"
    prompt += "Q: What do bees make from nectar?\nA: Honey.\n\n"
    prompt += "Q: Which sea lies between Europe and Africa?\nA: The Mediterranean.\n\n"
    await ask("answer", prompt + "Q: " + question + "\nA:", max_tokens=16, stop="\n")


async def tree_of_thought(ask: Ask, problem: str, width: int = 2) -> str:
    start = [system("You solve problems in steps and check your work."), user(problem)]

    async def solve(plan: Messages, number: int) -> tuple[str, int]:
        turns = [*plan, user(f"Carry the plan out, way {number + 1}.")]
        solution = await ask("solution", turns, max_tokens=24)
        turns += [assistant(solution), user("How sure are you, from 1 to 9?")]
        return solution, int(await ask("sure", turns, max_tokens=4, regex="[1-9]"))

    async def follow(index: int) -> list[tuple[str, int]]:
        turns = [*start, user(f"Give plan {index + 1} in one sentence.")]
        plan = await ask("plan", turns, max_tokens=24, stop="\n")
        turns += [assistant(plan)]
        return await asyncio.gather(*(solve(turns, number) for number in range(width)))

    found = await asyncio.gather(*(follow(index) for index in range(width)))
    return max((solution for branch in found for solution in branch), key=lambda one: one[1])[0]


async def react(ask: Ask, question: str, steps: int = 3) -> str | None:
    prompt = "Answer by thinking, acting and observing in turns. Actions: search, finish.\n\n"
    prompt += "Question: When was the old bridge built?\n"
    prompt += "Thought 1: I look up the bridge.\nAction 1: search[bridge]\n"
    prompt += "Observation 1: It was built in 1781.\n"
    prompt += "Thought 2: That is the answer.\nAction 2: finish[1781]\n\n"
    prompt += "Question: " + question + "\n"
    for step in range(1, steps + 1):
        prompt += f"Thought {step}:"
        prompt += await ask(f"thought {step}", prompt, max_tokens=20, stop="\n")
        prompt += f"\nAction {step}: "
        action = await ask(f"action {step}", prompt, choices=["search", "finish"])
        prompt += action + "["
        argument = await ask(f"argument {step}", prompt, max_tokens=10, stop=["]", "\n"])
        prompt += argument + "]\n"
        if action == "finish":
            return argument
        prompt += f"Observation {step}: {look_up(argument)}\n"
    return None


async def judge(ask: Ask, essay: str) -> float:
    start = [system("You judge essays, strictly but fairly."), user("Essay:\n" + essay)]

    async def view(dimension: str) -> Score:
        turns = [*start, user(f"Score its {dimension} from 1 to 5, with a reason.")]
        return Score.model_validate_json(await ask("view", turns, max_tokens=96, schema=Score))

    scores = await asyncio.gather(*map(view, DIMENSIONS))
    told = "; ".join(
        f"{name} {view.score}: {view.reason}" for name, view in zip(DIMENSIONS, scores, strict=True)
    )
    turns = [*start, user("The views were: " + told + ". Which grade?")]
    await ask("grade", turns, choices=["A", "B", "C", "D"])
    return sum(score.score for score in scores) / len(scores)


async def skeleton_of_thought(ask: Ask, question: str, points: int = 3) -> None:
    text = "Question: " + question + "\nThree points, a few words each:\n"
    names = []
    for number in range(1, points + 1):
        text += f"{number}."
        names.append(await ask(f"point {number}", text, max_tokens=10, stop=["\n", "."]))
        text += names[-1] + "\n"
    openings = ["\nMore about" + name + ":" for name in names]
    more = await asyncio.gather(
        *(ask("more", text + opening, max_tokens=24, stop="\n\n") for opening in openings)
    )
    for opening, part in zip(openings, more, strict=True):
        text += opening + part
    await ask("short", text + "\n\nIn short:", max_tokens=16, stop="\n")


async def summarise(ask: Ask, parts: list[str]) -> None:
    text = "You shorten texts. Keep names and years.\n\n"
    lines = await asyncio.gather(
        *(ask("line", f"{text}Text:\n{part}\n\nIn one line:", max_tokens=24, stop="\n") for part in parts)
    )
    text += "Notes:\n" + "".join("-" + line + "\n" for line in lines)
    await ask("summary", text + "\nAll of it in one paragraph:", max_tokens=48, stop="\n\n")


async def character(ask: Ask, name: str) -> dict[str, object]:
    text = name + " is somebody in a novel. As JSON, with name, trade, age and tools:\n"
    sheet = await ask("sheet", text, max_tokens=128, regex=CHARACTER_REGEX)
    text += sheet + "\nThe home town, in one word: "
    await ask("town", text, max_tokens=12, regex="[A-Z][a-z]{3,9}")
    found: dict[str, object] = json.loads(sheet)
    return found


async def chat(ask: Ask, questions: list[str]) -> None:
    turns = [system("You are a guide in a museum of clocks. Answer briefly and kindly.")]
    for number, question in enumerate(questions):
        turns.append(user(question))
        turns.append(assistant(await ask(f"answer {number}", turns, max_tokens=24)))


async def speculative_select(ask: Ask, mail: str) -> str:
    text = "Mail to the shop:\n" + mail + "\n\n"
    drafts = [
        ask("draft", f"{text}Kind of mail: {kind}\nReply: {opening}", max_tokens=20, stop="\n")
        for kind, opening in REPLIES.items()
    ]
    text += "Kind of mail: "
    kind, *written = await asyncio.gather(ask("kind", text, choices=list(REPLIES)), *drafts)
    text += kind + "\nReply: " + REPLIES[kind] + written[list(REPLIES).index(kind)] + "\n"
    await ask("urgent", text + "Urgent: ", choices=["yes", "no"])
    return kind


async def story(ask: Ask, hero: str) -> str:
    text = "A story for children about " + hero + ".\n\nOnce upon a time"
    text += await ask("beginning", text, max_tokens=32, stop="\n\n")
    text += "\n\nBut then"
    text += await ask("turn", text, max_tokens=32, stop="\n\n")
    return await ask("end", text + "\n\nAnd so", max_tokens=24, stop="\n\n")


PROGRAMS: dict[str, Callable[..., Awaitable[Any]]] = {
    "few-shot": few_shot,
    "tree-of-thought": tree_of_thought,
    "react": react,
    "judge": judge,
    "skeleton-of-thought": skeleton_of_thought,
    "map-reduce": summarise,
    "json-by-regex": character,
    "multi-turn-chat": chat,
    "speculative-select": speculative_select,
    "streaming": story,
}
"""Name in `tests.lang.programs.CASES` → program."""
