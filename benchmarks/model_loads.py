"""Loading and unloading one of several models: seconds to its first token, and the memory that it takes.

``python -m benchmarks.model_loads FILE [--times N]``. With ``--packed-cache-gb 0`` every load packs the
weights, as the first one does; otherwise all but the very first map them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time

from ramify.messages import Generate
from ramify.runtime.config import EngineConfig
from ramify.runtime.models.memory import proportional_size
from ramify.runtime.models.pool import ModelPool
from ramify.sampling_params import SamplingParams

MIB = 2**20


async def loads(config: EngineConfig, times: int) -> None:
    pool = ModelPool(config, {"model": config.model})
    print(f"{'load s':>8}{'token s':>9}{'unload s':>9}{'resident MiB':>14}{'left MiB':>10}")
    for _ in range(times):
        started = time.perf_counter()
        async with pool.use("model") as frontend:
            loaded = time.perf_counter()
            sampling = SamplingParams(max_tokens=1, temperature=0.0)
            request = Generate(rid=frontend.new_rid(), prompt=("The first token",), sampling=sampling)
            async for _chunk in frontend.generate(request):
                pass
            answered = time.perf_counter()
        await pool.measure()
        resident = pool.status("model").resident or 0
        begun = time.perf_counter()
        await pool.unload("model")
        ended = time.perf_counter()
        left = proportional_size([os.getpid()])
        print(
            f"{loaded - started:8.2f}{answered - loaded:9.2f}{ended - begun:9.2f}"
            f"{resident / MIB:14.0f}{left / MIB:10.0f}",
            flush=True,
        )
    await pool.aclose()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--packed-cache-gb", type=float, default=20.0)
    options = parser.parse_args()
    config = EngineConfig(model=options.model, packed_cache_gb=options.packed_cache_gb)
    asyncio.run(loads(config, options.times))


if __name__ == "__main__":
    main()
