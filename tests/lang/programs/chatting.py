"""Chats: several turns, and a story that is streamed."""

from __future__ import annotations

import ramify as rm
from tests.lang.programs.case import Case


@rm.function
def chat(s: rm.ProgramState, questions: list[str]) -> None:
    s += rm.system("You are a guide in a museum of clocks. Answer briefly and kindly.")
    for number, question in enumerate(questions):
        s += rm.user(question)
        s += rm.assistant(rm.gen(f"answer {number}", max_tokens=24, temperature=0.0))


CHAT = Case(
    name="multi-turn-chat",
    program=chat,
    arguments=[
        {"questions": ["Which clock is the oldest?", "Who built it?", "Does it still run?", "Thank you!"]},
        {"questions": ["How does a pendulum keep time?", "And on a ship?", "Why not?"]},
    ],
    varied="questions",
    script=lambda request: "It is the one by the door, from 1540.",
)


@rm.function
def story(s: rm.ProgramState, hero: str) -> str:
    s += "A story for children about " + hero + ".\n\nOnce upon a time"
    s += rm.gen("beginning", max_tokens=32, stop="\n\n", temperature=0.0)
    s += "\n\nBut then" + rm.gen("turn", max_tokens=32, stop="\n\n", temperature=0.0)
    s += "\n\nAnd so" + rm.gen("end", max_tokens=24, stop="\n\n", temperature=0.0)
    return s.get("end", str)


STORY = Case(
    name="streaming",
    program=story,
    arguments=[{"hero": "a fox who fears the dark"}, {"hero": "a lighthouse"}, {"hero": "two snails"}],
    varied="hero",
    script={"beginning": " there was a fox.", "turn": " night fell.", "end": " it slept."},
    streams=("beginning", "turn", "end"),
)
