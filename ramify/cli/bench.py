"""`ramify bench`: a load test of an OpenAI-compatible endpoint, or of two in alternation."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any, TextIO

from ramify.cli.signals import told_on_interrupt
from ramify.cli.target import add_key_flag, first_model
from ramify.credentials import endpoint_key, without_credentials
from ramify.errors import InvalidRequest
from ramify.loop import wait

if TYPE_CHECKING:
    from ramify.bench.client import Endpoint
    from ramify.bench.plan import Plan

USUAL = "single,batch,prefix,tree"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from ramify.bench.workloads import WORKLOADS

    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "workloads:\n" + "\n".join(
        f"  {name:<10} {(make.__doc__ or '').strip()}" for name, make in WORKLOADS.items()
    )
    parser.add_argument(
        "--url",
        metavar="URL",
        default="http://127.0.0.1:30000",
        help="The server to load. (default: %(default)s)",
    )
    add_key_flag(parser, "--api-key")
    parser.add_argument(
        "--model", metavar="NAME", help="The model to ask for. (default: the first that the server lists)"
    )
    parser.add_argument("--name", metavar="TEXT", help="Name of the server in the report. (default: its URL)")
    other = parser.add_argument_group("a second endpoint, measured in alternation")
    for flag, metavar, text in (
        ("--against", "URL", "The second server. The report has the ratios of both."),
        ("--against-key", "KEY", "Its API key."),
        ("--against-model", "NAME", "The model to ask it for. (default: the first that it lists)"),
        ("--against-name", "TEXT", "Its name in the report. (default: its URL)"),
    ):
        other.add_argument(flag, metavar=metavar, help=text)
    load = parser.add_argument_group("the load")
    load.add_argument(
        "--workload", metavar="NAME,…", help=f"The workloads, which are listed below. (default: {USUAL})"
    )
    load.add_argument(
        "--prompts", metavar="FILE", help="Request bodies as JSON lines, for the workload prompts."
    )
    load.add_argument("--rate", metavar="X,…", help="Requests a second, instead of a fixed concurrency.")
    load.add_argument(
        "--arrivals",
        choices=("poisson", "constant"),
        help="With --rate: a Poisson process, or constant intervals. (default: poisson)",
    )
    load.add_argument(
        "--runs",
        type=int,
        default=1,
        metavar="N",
        help="Number of repetitions, of which medians are shown. (default: %(default)s)",
    )
    for name, what in (
        ("requests", "Number of requests; for tree, of chats."),
        ("concurrency", "Number of requests at a time."),
        ("prompt-tokens", "Length of the prompt, or of the shared prefix, in tokens."),
        ("max-tokens", "Length of the output, in tokens."),
    ):
        load.add_argument(f"--{name}", type=int, metavar="N", help=f"{what} (default: the workload's own)")
    load.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Outputs go on after the end-of-sequence token, up to their full length. (default: on)",
    )
    load.add_argument(
        "--goodput",
        metavar="ttft=MS,…",
        help="Also count the requests that are within these bounds in milliseconds: ttft, tpot, e2e.",
    )
    load.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="Seed of prompts and arrivals. (default: %(default)s)",
    )
    load.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="A request fails after this many seconds of silence; 0: never. (default: %(default)g)",
    )
    report = parser.add_argument_group("the report")
    report.add_argument("--json", action="store_true", help="Print a JSON line for each run, and no table.")
    report.add_argument("--jsonl", metavar="FILE", help="Write these lines to a file.")
    report.add_argument("--html", metavar="FILE", help="Write a report with plots. Needs matplotlib.")


def run_command(options: argparse.Namespace) -> int:
    from ramify.bench import plan as plans
    from ramify.bench.report import check_matplotlib, report
    from ramify.bench.table import terminal

    if options.html is not None:
        check_matplotlib()
    plan = wait(_plan(options))
    done: list[dict[str, Any]] = []

    def standing() -> str:
        where = "above" if options.jsonl is None else f"in {options.jsonl}"
        return (
            f"{len(done)} of {plan.measurements} measurements are done; their figures are {where}. "
            f"A load test does not go on: to measure anew, {options.command_line}"
        )

    def tell(line: dict[str, Any]) -> None:
        _tell(options.json, lines, line)
        done.append(line)

    with contextlib.ExitStack() as stack:
        stack.enter_context(told_on_interrupt(standing))
        lines = None if options.jsonl is None else stack.enter_context(_open(options.jsonl))
        series = wait(plans.run_plan(plan, tell))
        for line in plans.ratios(series):
            _tell(options.json, lines, line)
    if not options.json:
        print(terminal(series))
    if options.html is not None:
        with _open(options.html) as file:
            file.write(report(series, plan))
    return 1 if any(one.median["failed"] for one in series) else 0


def _tell(as_json: bool, file: TextIO | None, line: dict[str, Any]) -> None:
    text = json.dumps(line)
    if as_json:
        print(text, flush=True)
    elif "ratio" not in line:
        rate = "" if line["rate"] is None else f" at {line['rate']:g}/s"
        speed = f"{line['requests_per_s']:.2f} requests/s, {line['output_tokens_per_s']:.1f} output tokens/s"
        print(
            f"{line['endpoint']}, {line['workload']}{rate}, run {line['run'] + 1}: {speed}", file=sys.stderr
        )
    if file is not None:
        file.write(text + "\n")
        file.flush()


def _open(path: str) -> TextIO:
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be written: {error.strerror}.") from None


async def _plan(options: argparse.Namespace) -> Plan:
    from ramify.bench.figures import read_bounds
    from ramify.bench.plan import Plan, check_workloads
    from ramify.bench.workloads import Sizes, read_prompts

    for name in ("requests", "concurrency", "prompt_tokens", "max_tokens", "runs"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise InvalidRequest(f"--{name.replace('_', '-')} must be at least 1.", field=name)
    prompts = [] if options.prompts is None else read_prompts(options.prompts)
    workloads = (options.workload or ("prompts" if prompts else USUAL)).split(",")
    check_workloads(workloads, bool(prompts))
    if prompts and "prompts" not in workloads:
        raise InvalidRequest(
            "--prompts is for the workload prompts, which was not asked for.", field="prompts"
        )
    rates = [None] if options.rate is None else [_rate(part) for part in options.rate.split(",")]
    bounds = {} if options.goodput is None else read_bounds(options.goodput)
    endpoints = [await _endpoint(options.url, options.model, options.name, endpoint_key(options.api_key))]
    if options.against is not None:
        endpoints.append(
            await _endpoint(options.against, options.against_model, options.against_name, options.against_key)
        )
        if endpoints[0].name == endpoints[1].name:
            raise InvalidRequest("Both endpoints have one name.", remedy="Give --name and --against-name.")
    elif options.against_key or options.against_model or options.against_name:
        raise InvalidRequest("--against-key, --against-model and --against-name need --against.")
    sizes = Sizes(
        requests=options.requests,
        concurrency=options.concurrency,
        prompt_tokens=options.prompt_tokens,
        max_tokens=options.max_tokens,
        exact=options.ignore_eos,
        prompts=prompts,
    )
    if options.arrivals is not None and options.rate is None:
        raise InvalidRequest("--arrivals needs --rate.", field="arrivals")
    return Plan(
        endpoints,
        workloads,
        sizes,
        rates,
        options.runs,
        str(options.seed),
        bounds,
        options.timeout or None,
        options.arrivals or "poisson",
    )


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise InvalidRequest(f"--rate {text!r} is not a number of requests a second.", field="rate")
    return rate


async def _endpoint(url: str, model: str | None, name: str | None, api_key: str | None) -> Endpoint:
    from ramify.bench.client import Endpoint

    base = url.rstrip("/").removesuffix("/v1") + "/v1"
    found = model or await first_model(base, api_key, "Give --model.")
    return Endpoint(name or without_credentials(base.removesuffix("/v1")), base, found, api_key)
