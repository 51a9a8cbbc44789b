"""Programs whose outputs have a form: JSON by regular expressions, and reasoning with actions."""

from __future__ import annotations

import json

import ramify as rm
from tests.lang.programs.case import Case

CHARACTER_REGEX = (
    r'\{"name": "[A-Z][a-z]{2,9}( [A-Z][a-z]{2,9})?", '
    r'"trade": "(smith|sailor|cook|painter)", '
    r'"age": [1-9][0-9]?, '
    r'"tools": \["[a-z]{3,8}"(, "[a-z]{3,8}"){0,2}\]\}'
)


@rm.function
def character(s: rm.ProgramState, name: str) -> dict[str, object]:
    s += name + " is somebody in a novel. As JSON, with name, trade, age and tools:\n"
    s += rm.gen("sheet", regex=CHARACTER_REGEX, max_tokens=128, temperature=0.0)
    s += "\nThe home town, in one word: "
    s += rm.gen("town", regex="[A-Z][a-z]{3,9}", max_tokens=12, temperature=0.0) + "\n"
    found: dict[str, object] = json.loads(s["sheet"])
    return found


CHARACTER = Case(
    name="json-by-regex",
    program=character,
    arguments=[{"name": "Alma Reed"}, {"name": "Jon Harker"}, {"name": "Mira Vale"}, {"name": "Tomas Quill"}],
    varied="name",
    script={
        "sheet": '{"name": "Alma Reed", "trade": "smith", "age": 44, "tools": ["anvil", "tongs"]}',
        "town": "Harlow",
    },
)

FACTS = {
    "river": "The Ouse runs through the town and is crossed by nine bridges.",
    "tower": "The tower is 52 metres high and was finished in 1420.",
    "market": "The market is held on Saturdays.",
}


def look_up(query: str) -> str:
    """The fact whose keyword is in the query."""
    found = [fact for word, fact in FACTS.items() if word in query.lower()]
    return found[0] if found else "Nothing was found."


@rm.function
def react(s: rm.ProgramState, question: str, steps: int = 3) -> str | None:
    s += "Answer by thinking, acting and observing in turns. Actions: search, finish.\n\n"
    s += "Question: When was the old bridge built?\n"
    s += "Thought 1: I look up the bridge.\nAction 1: search[bridge]\nObservation 1: It was built in 1781.\n"
    s += "Thought 2: That is the answer.\nAction 2: finish[1781]\n\n"
    s += "Question: " + question + "\n"
    for step in range(1, steps + 1):
        s += f"Thought {step}:" + rm.gen(f"thought {step}", max_tokens=20, stop="\n", temperature=0.0)
        s += f"\nAction {step}: " + rm.select(f"action {step}", ["search", "finish"]) + "["
        s += rm.gen(f"argument {step}", max_tokens=10, stop=["]", "\n"], temperature=0.0) + "]\n"
        argument: str = s[f"argument {step}"]
        if s[f"action {step}"] == "finish":
            return argument
        s += f"Observation {step}: {look_up(argument)}\n"
    return None


REACT = Case(
    name="react",
    program=react,
    arguments=[
        {"question": "How high is the tower of the town?"},
        {"question": "How many bridges cross the river?"},
        {"question": "On which day is the market?"},
    ],
    varied="question",
    script={
        "thought 1": " I look it up.\n",
        "action 1": "search",
        "argument 1": "tower]",
        "thought 2": " I know.\n",
        "action 2": "finish",
        "argument 2": "52 metres]",
    },
)
