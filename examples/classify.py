"""Few-shot classification of the rows of a CSV file, many at once.

All rows share the examples at the start of the prompt, which are computed once.

python examples/classify.py
"""

from __future__ import annotations

import csv
from pathlib import Path

import ramify as rm

ROWS = Path(__file__).with_name("reviews.csv")
LABELS = ("positive", "negative")


@rm.function
def classify(s: rm.ProgramState, text: str) -> None:
    s += "Decide whether a review is positive or negative.\n\n"
    s += "Review: Arrived early and works perfectly.\nLabel: positive\n\n"
    s += "Review: Broke on the second day, and nobody answers my mails.\nLabel: negative\n\n"
    s += "Review: The best kettle I have ever had.\nLabel: positive\n\n"
    s += "Review: " + text + "\nLabel:" + rm.select("label", choices=[f" {label}" for label in LABELS])


def main(backend: rm.Backend | None = None) -> float:
    with ROWS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    states = classify.run_batch(
        [{"text": row["text"]} for row in rows], backend=backend or rm.Engine(), progress_bar=True
    )
    right = 0
    for row, state in zip(rows, states, strict=True):
        label = state["label"].strip()
        right += label == row["label"]
        print(f"{label:8} {'' if label == row['label'] else '(wrong)':7} {row['text']}")
    prompt = sum(state.usage.prompt_tokens for state in states)
    cached = sum(state.usage.cached_tokens for state in states)
    print(f"\n{right} of {len(rows)} right; {cached / prompt:.0%} of {prompt} prompt tokens were cached")
    return right / len(rows)


if __name__ == "__main__":
    main()
