"""Each kernel of the main path against torch or its twin: the cases of `benchmarks.kernels`, not timed.

Outputs are filled with NaN before. A case fails if its kernel leaves a part of the output unwritten, differs
from all others, or gives other bits in a second run. The other cases go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu_visit.device import device_of, free
from benchmarks.gpu_visit.figures import Figures
from benchmarks.gpu_visit.parts.kernels import rank
from benchmarks.kernels import Wrong, check
from ramify.kernels.reference import float8 as twin_float8
from ramify.kernels.reference import quantised as twin_quantised
from ramify.kernels.triton import float8, quantised
from ramify.kernels.triton.ahead import fix_cache_keys
from ramify.kernels.weights.quantised import QuantisedWeight
from ramify.runtime.executor.device import FLOAT8, capability_of
from tests.kernels import float8_cases
from tests.kernels.kernel_cases.base import Case, Work, cases, half


@torch.inference_mode()
def run(figures: Figures) -> None:
    device = device_of(figures)
    fix_cache_keys()
    torch.manual_seed(0)
    for case in (*sorted(cases(tiny=figures.tiny), key=rank), *weights(device, tiny=figures.tiny)):
        if lack := case.lacks(device):
            figures.add(case.name, skipped=lack)
            continue
        with figures.attempt(case.name):
            errors, unavailable = check(case.build(device))
            if not errors:
                raise Wrong(f"there is nothing to compare with: {unavailable}")
            figures.add(case.name, error_rel=min(errors.values()))
        free(device)


def weights(device: torch.device, *, tiny: bool = False) -> Iterator[Case]:
    """Products with float8 and with quantised weights.

    The quantised product comes last because, where nothing is compiled yet, it first compiles for the CPU,
    for 8 s.
    """
    size = 64 if tiny else 4096
    if (capability_of(device) or FLOAT8) >= FLOAT8:
        made = partial(float8_cases.weight_of, size, size, 0)
        kernels = float8.float8_matmul, twin_float8.float8_matmul
        yield Case("float8 product", partial(_product, *kernels, made, size))
    made = partial(_int4, size)
    kernels = quantised.quantised_matmul, twin_quantised.quantised_matmul
    yield Case("W4A16 product", partial(_product, *kernels, made, size))


def _int4(size: int, device: str) -> QuantisedWeight:
    from tests.kernels import quantised_cases  # compiles for the CPU

    return quantised_cases.weight_of("int4", 128, size, size, device)


def _product(
    kernel: Callable[..., Tensor],
    twin: Callable[..., Tensor],
    weight_of: Callable[[str], object],
    size: int,
    device: torch.device,
) -> Work:
    weight = weight_of(str(device))
    x = torch.randn(64, size, device=device).to(half(device))
    out = torch.empty_like(x)
    return Work(
        partial(kernel, x, weight, out=out),
        0,
        checks={"twin": partial(twin, x, weight)},
        reset=partial(out.fill_, torch.nan),
    )
