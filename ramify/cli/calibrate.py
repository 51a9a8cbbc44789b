"""`ramify calibrate FILE`: measures decisions on labelled questions, and fits temperatures to them."""

from __future__ import annotations

import argparse
import asyncio
import collections
import itertools
import secrets
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, get_args

import msgspec
from tqdm import tqdm

from ramify.cli.inputs.labelled_file import LabelledQuestion, labelled_questions, read_file, wrong_lines
from ramify.cli.signals import told_on_interrupt
from ramify.cli.target import add_target_flags, target
from ramify.decisions.answers import answer
from ramify.decisions.calibration import (
    BINS,
    EXTREME,
    FOLDS,
    HIGHEST,
    KINDS,
    LEAST_ITEMS,
    LOWEST,
    Fit,
    LabelledAnswer,
    calibration_for,
    chance,
    fit,
    groups,
    measures,
)
from ramify.decisions.checks import place_of
from ramify.errors import EngineError, InvalidRequest, RamifyError
from ramify.lang.batch.output import check_file
from ramify.loop import cancel_at_end, wait
from ramify.messages import Generate
from ramify.model_info import ChatFormat, ModelInfo
from ramify.priority import BATCH
from ramify.questions import (
    MAX_QUESTIONS,
    Calibration,
    Decide,
    DecisionScores,
    LayoutName,
    Normalisation,
    OptionEnd,
    QuestionScores,
    Temperature,
)
from ramify.runtime.server.decisions.ask import emptied
from ramify.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ramify.lang.backends.endpoint import RuntimeEndpoint
    from ramify.runtime.engine.engine import Engine

IN_FLIGHT = 64
"""Most requests at a time."""
ANY_CHAT = ChatFormat(prefix={}, suffix={}, exact=True)
"""A format that accepts any input, with which a file is checked before a model is loaded."""

DESCRIPTION = f"""\
Ask labelled questions, and print how often and how surely the answers are right. With --output, fit
temperatures that make the probabilities agree with the labels.

FILE has a JSON object on each line: `input` and `question` as in a body of /v1/decisions, and the `label`.

  {{"input": "It broke.", "label": true, "question": {{"type": "predicate", "instructions": "A complaint?"}}}}

The label of a predicate is true or false, that of a choice one of its values, and that of a score the label
or the number of a level, counted from 0. Flags that may be repeated compare all combinations.

Figures, the last four before -> after:
  mass    mean option mass: the probability that the model answers with any of the options
  NLL     mean negative natural logarithm of the right option's probability
  Brier   mean sum over the options of the squared error of the probability, from 0 to 2
  ECE     expected calibration error, in {BINS} bins of the largest probability
  certain share of answers with a probability above {EXTREME}
Before: as the target answers now, by its own calibration if it has one. After: by temperatures that were
fitted to the questions about other states ({FOLDS} parts). The file written is fitted to all questions.

A temperature is for a kind of question (choice), or for a kind and a number of options (choice:4). It needs
{LEAST_ITEMS} questions, and is refused if it does not lower their NLL by more than the standard error, if
it is at a bound ({LOWEST:g} or {HIGHEST:g}), or if it makes most answers certain. The reasons are printed.
A number of options without a temperature has that of its kind, or 1 if it has {LEAST_ITEMS} questions and
that raises their NLL. With --output, the exit status is 1 if no temperature is left to write."""
LOW_MASS = 0.1
"""Mean option mass below which a warning is printed: the model means to answer something else."""


class Way(NamedTuple):
    """A way to ask questions."""

    decide: Decide
    """Without questions."""
    normalise: Normalisation


class Asked(NamedTuple):
    """The answers to all labelled questions."""

    layout: str
    masses: list[float]
    """Option mass of each."""
    items: list[LabelledAnswer]
    now: list[Sequence[float]]
    """Probabilities as the target answers, by its own calibration if it has one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = DESCRIPTION
    parser.add_argument("file", metavar="FILE", help="Labelled questions, as JSON lines. -: standard input.")
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="Write temperatures to this JSON file, for `ramify serve --calibration`.",
    )
    for flag, kind, text in (
        (
            "--layout",
            LayoutName,
            "Layout in which questions are written. The flag may be repeated. (default: auto)",
        ),
        (
            "--end",
            OptionEnd,
            "The event at which an option's tokens end. The flag may be repeated. (default: prefix)",
        ),
        ("--normalise", Normalisation, "The weight of an option. The flag may be repeated. (default: sum)"),
    ):
        parser.add_argument(flag, action="append", choices=get_args(kind), help=text)
    parser.add_argument(
        "--permutations",
        action="append",
        type=int,
        metavar="K",
        help="Number of orders of the options that are averaged. The flag may be repeated. (default: 1)",
    )
    add_target_flags(parser)


def run_command(options: argparse.Namespace) -> int:
    unwritten = "" if options.output is None else f" {options.output} is not written."
    with told_on_interrupt(lambda: f"No answers are kept.{unwritten} To begin anew: {options.command_line}"):
        return _calibrate(options)


def _calibrate(options: argparse.Namespace) -> int:
    ways = [
        Decide(questions=(), layout=layout, end=end, permutations=permutations)
        for layout, end, permutations in itertools.product(
            options.layout or ["auto"], options.end or ["prefix"], options.permutations or [1]
        )
    ]
    normalisations: list[Normalisation] = options.normalise or ["sum"]
    if options.output is not None:
        if len(ways) * len(normalisations) > 1:
            raise InvalidRequest(
                "--output needs one layout, end, normalise and permutations: temperatures hold for one.",
                field="--output",
            )
        check_file(options.output, "--output")
    content = read_file(options.file)
    labelled_questions(content, ANY_CHAT)
    with target(options) as backend:
        info = wait(backend.info())
        reports: list[tuple[float, str]] = []
        for decide in ways:
            trained = info.trained_layout_for(decide.layout)
            labelled = labelled_questions(content, info.chat_format, trained)
            scores = wait(_scores(backend, labelled, decide))
            empty = None
            if "pmi" in normalisations:
                empty = wait(_scores(backend, _behind_nothing(labelled), decide))
            for normalise in normalisations:
                way = Way(decide, normalise)
                asked = _answered(info, labelled, scores, empty, way)
                found = fit(asked.items)
                print(_report(way, asked, found))
                after = measures(asked.items, found.held_out)
                reports.append((after.nll, _name(way, asked)))
    if len(reports) > 1:
        print("Lowest NLL after: {:.3f}, with {}.".format(*min(reports, key=lambda one: one[0])))
    if options.output is None:
        return 0
    if not found.temperatures:
        print(f"No temperature was fitted: {options.output} is not written.")
        return 1
    calibration = Calibration(
        model=info.digest,
        layout=asked.layout,
        temperatures={name: Temperature(base=value) for name, value in found.temperatures.items()},
        end=way.decide.end,
        permutations=way.decide.permutations,
        normalise=way.normalise,
    )
    Path(options.output).write_bytes(msgspec.json.format(msgspec.json.encode(calibration), indent=2) + b"\n")
    names = ", ".join(found.temperatures)
    print(f"{options.output} has temperatures of {info.name} in {asked.layout} for {names}.")
    return 0


# --- asking -----------------------------------------------------------------------------------------


async def _scores(
    backend: Engine | RuntimeEndpoint, labelled: Sequence[LabelledQuestion], decide: Decide
) -> list[QuestionScores]:
    """The scores of all questions, in their order. Questions about equal states are asked together.

    Raises `InvalidRequest` that names all lines which the engine refuses.
    """
    states: dict[Hashable, list[int]] = {}
    for at, one in enumerate(labelled):
        states.setdefault(one.key, []).append(at)
    batches = [
        places[at : at + MAX_QUESTIONS]
        for places in states.values()
        for at in range(0, len(places), MAX_QUESTIONS)
    ]
    room = asyncio.Semaphore(IN_FLIGHT)
    flow = secrets.token_hex(8)
    found: dict[int, QuestionScores] = {}
    wrong: dict[int, RamifyError] = {}

    async def ask(number: int, batch: list[int]) -> None:
        request = msgspec.structs.replace(
            labelled[batch[0]].state,
            decide=msgspec.structs.replace(decide, questions=tuple([labelled[at].question for at in batch])),
            sampling=SamplingParams(max_tokens=0),
            priority=BATCH,
            flow=flow,
        )
        try:
            async with room:
                scores = await _answer_of(backend, request, f"{flow}-{number}")
        except InvalidRequest as error:
            place = place_of(error.field)
            if place is None:
                places = batch  # the state is wrong
            elif place.question is not None:
                places = [batch[place.question]]
            else:
                raise
            wrong.update((labelled[at].line, error) for at in places)
        else:
            found.update(zip(batch, scores, strict=True))
            progress.update(len(batch))

    progress = tqdm(total=len(labelled), unit="question", leave=False, disable=None)  # None: on a terminal
    tasks = [asyncio.ensure_future(ask(number, batch)) for number, batch in enumerate(batches)]
    with progress:
        async with cancel_at_end(tasks):
            await asyncio.gather(*tasks)
    if wrong:
        raise wrong_lines(wrong)
    return [found[at] for at in range(len(labelled))]


async def _answer_of(
    backend: Engine | RuntimeEndpoint, request: Generate, rid: str
) -> Sequence[QuestionScores]:
    """The scores of one request, which is sent again after transient errors."""
    attempts = itertools.count()

    async def send() -> DecisionScores:
        sent = msgspec.structs.replace(request, rid=f"{rid}-{next(attempts)}")
        chunks = [chunk async for chunk in backend.generate(sent)]
        if not chunks or chunks[-1].decisions is None:
            raise EngineError("The target has answered no questions.")
        return chunks[-1].decisions

    return (await backend.retry.call(send)).questions


def _behind_nothing(labelled: Sequence[LabelledQuestion]) -> list[LabelledQuestion]:
    return [one._replace(state=emptied(one.state)) for one in labelled]


def _answered(
    info: ModelInfo,
    labelled: Sequence[LabelledQuestion],
    scores: Sequence[QuestionScores],
    empty: Sequence[QuestionScores] | None,
    way: Way,
) -> Asked:
    """Raises `InvalidRequest` if the questions were written in several layouts."""
    layouts = collections.Counter(each.layout for each in scores)
    if len(layouts) > 1:
        counts = ", ".join(f"{name} ({count})" for name, count in layouts.most_common())
        raise InvalidRequest(
            f"The questions were written in several layouts: {counts}.",
            field="--layout",
            remedy="Name one, such as --layout labels.",
        )
    own = calibration_for(info.calibration, way.decide.end, way.decide.permutations, way.normalise)
    states: dict[Hashable, int] = {}
    items: list[LabelledAnswer] = []
    now: list[Sequence[float]] = []
    masses: list[float] = []
    for at, (one, each) in enumerate(zip(labelled, scores, strict=True)):
        without = None if empty is None else empty[at]
        plain = answer(one.question, each, way.normalise, without)
        assert plain.option_mass is not None  # only endpoints of other servers give none
        masses.append(plain.option_mass)
        items.append(
            LabelledAnswer(
                kind=plain.kind,
                probabilities=plain.probabilities,
                label=one.label,
                state=states.setdefault(one.key, len(states)),
            )
        )
        now.append(answer(one.question, each, way.normalise, without, own).probabilities)
    return Asked(scores[0].layout, masses, items, now)


# --- the report -------------------------------------------------------------------------------------


def _name(way: Way, asked: Asked) -> str:
    decide = way.decide
    return f"{asked.layout}, end {decide.end}, normalise {way.normalise}, permutations {decide.permutations}"


def _report(way: Way, asked: Asked, found: Fit) -> str:
    states = len({item.state for item in asked.items})
    lines = [
        f"{_name(way, asked)}: {len(asked.items)} questions about {states} states",
        f"{'':<14}{'items':>7}{'accuracy':>10}{'mass':>7}{'NLL':>17}{'Brier':>17}{'ECE':>17}{'certain':>17}"
        f"{'temperature':>13}",
    ]
    warnings = []
    for name, places in (groups(asked.items) | {"all": range(len(asked.items))}).items():
        items = [asked.items[at] for at in places]
        one = measures(items, [asked.now[at] for at in places])
        other = measures(items, [found.held_out[at] for at in places])
        mass = sum(asked.masses[at] for at in places) / len(places)
        pairs = [(one.nll, other.nll), (one.brier, other.brier), (one.ece, other.ece)]
        figures = [f"{before:.3f} -> {then:.3f}" for before, then in pairs]
        figures.append(f"{one.extreme:.1%} -> {other.extreme:.1%}")
        temperature = found.temperatures.get(name)
        lines.append(
            f"{name:<14}{one.items:>7}{one.accuracy:>10.1%}{mass:>7.3f}"
            + "".join(f"{each:>17}" for each in figures)
            + ("" if temperature is None else f"{temperature:>13.2f}")
        )
        if name in KINDS:
            warnings += [f"warning: {name}: {text}" for text in _warnings(items, one.accuracy, mass)]
    for name, reason in found.refused.items():
        kind = name.partition(":")[0]
        instead = found.temperatures.get(name, found.temperatures.get(kind))
        used = "" if instead is None else f"; {instead:.2f} is used"
        lines.append(f"no temperature for {name}: {reason}{used}")
    return "\n".join(lines + warnings)


def _warnings(items: Sequence[LabelledAnswer], accuracy: float, mass: float) -> list[str]:
    found = []
    expected, clearly_above = chance(items)
    if accuracy <= clearly_above:
        found.append(
            f"an accuracy of {accuracy:.1%} is not clearly above chance, {expected:.1%}: a temperature can "
            "only flatten such probabilities"
        )
    if mass < LOW_MASS:
        found.append(
            f"a mean option mass of {mass:.3f} is small: the model means to answer something else; compare "
            "other layouts"
        )
    return found
