"""Programs over given texts: few-shot answers, and a summary by parts."""

from __future__ import annotations

import ramify as rm
from tests.lang.programs.case import Case


@rm.function
def few_shot(s: rm.ProgramState, question: str) -> None:
    s += "Answer each question with one short fact.\n\n"
    s += "Q: Which metal is liquid at room temperature?\nA: Mercury.\n\n"
    s += "Q: How many strings does a violin have?\nA: Four.\n\n"
    s += "Q: Which planet has the shortest year?\nA: Mercury.\n\n"
    s += "Q: What do bees make from nectar?\nA: Honey.\n\n"
    s += "Q: Which sea lies between Europe and Africa?\nA: The Mediterranean.\n\n"
    s += "Q: " + question + "\nA:" + rm.gen("answer", max_tokens=16, stop="\n", temperature=0.0)


FEW_SHOT = Case(
    name="few-shot",
    program=few_shot,
    arguments=[
        {"question": "Which bird cannot fly but swims well?"},
        {"question": "What is the hardest natural material?"},
        {"question": "Which instrument has black and white keys?"},
        {"question": "What does a thermometer measure?"},
    ],
    varied="question",
    script={"answer": " The penguin.\n\nQ: And"},
)

PARTS = [
    "The harbour was built in 1820, when ships still carried grain. Two stone piers keep the waves out, "
    "and the northern one carries a lighthouse that was lit with oil until 1931.",
    "Since the railway came, the grain has gone by land. The basins silted up, and for forty years only "
    "fishing boats used them. The town thought of filling them in.",
    "Today the harbour lives on sailing boats. The old grain store is a school for boat builders, and the "
    "lighthouse can be visited in summer. A café in the keeper's house pays for the repairs.",
]


@rm.function
def summarise(s: rm.ProgramState, parts: list[str]) -> None:
    s += "You shorten texts. Keep names and years.\n\n"
    forks = s.fork(len(parts))
    for fork, part in zip(forks, parts, strict=True):
        fork += "Text:\n" + part + "\n\nIn one line:"
        fork += rm.gen("line", max_tokens=24, stop="\n", temperature=0.0)
    lines = forks["line"]
    forks.join()
    s += "Notes:\n"
    for line in lines:
        s += "-" + line + "\n"
    s += "\nAll of it in one paragraph:" + rm.gen("summary", max_tokens=48, stop="\n\n", temperature=0.0)


SUMMARY = Case(
    name="map-reduce",
    program=summarise,
    arguments=[{"parts": PARTS}, {"parts": PARTS[1:]}],
    varied="parts",
    script={"line": " A harbour.", "summary": " A harbour of 1820."},
)
