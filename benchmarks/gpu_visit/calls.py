"""The parts of each call, in their order, with their seconds."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a call: ``benchmarks.gpu_visit.parts.NAME.run(figures)`` in a process of its own.

    seconds : time limit of the part, which may also use seconds that earlier parts left
    about : one line about the part for the table
    """

    name: str
    seconds: float
    about: str


VERSIONS = Part("versions", 10, "device, driver, libraries")
"""The first part of each call; the call's table names the versions. From a cold disk, importing torch takes
most of its time."""

CALLS: dict[str, tuple[Part, ...]] = {
    "A": (
        VERSIONS,
        Part("ceilings", 10, "a large copy and an 8192³ product: what the card reaches"),
        Part("twins", 35, "each kernel against torch or its twin, outputs poisoned before"),
        Part("toy", 40, "a toy engine: graphs, overlap, cascade and the cache change no bit"),
        Part("engine", 55, "Llama-3.1-8B's shape at batch 1, 32, 256; a 4k prompt; an 8k prefix"),
    ),
    "B": (
        VERSIONS,
        Part("profile", 30, "time by kernel and idle time of five steps"),
        Part("library", 40, "32 layers of the library's kernels in one graph: the headline ratio"),
        Part("kernels", 60, "our kernels against the ceilings and torch's own, pages of 64"),
        Part("long", 55, "long contexts, and deterministic decodes"),
        Part("serve", 35, "ramify serve: 64 requests, half of them with a schema"),
    ),
    "C": (
        VERSIONS,
        Part("engine_tests", 95, "tests of the engine, alone on the device"),
        Part("kernel_tests", 100, "tests of the kernels, shared out among processes"),
    ),
    "D": (
        VERSIONS,
        Part("trials", 170, "each trial on against off: kernels alone, then whole engines"),
    ),
}
