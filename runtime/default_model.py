"""The notice that the default model runs because no model was named."""

from __future__ import annotations

import functools
import logging

from ramify.runtime.config import DEFAULT_MODEL

log = logging.getLogger(__name__)

NOTICE = (
    f"{DEFAULT_MODEL} runs because no model was named. It is for trying Ramify, not for its answers. "
    "For those name another, such as Qwen/Qwen3-4B-GGUF:Q4_K_M on a machine with 8 GB."
)


@functools.cache
def tell_of_default_model() -> None:
    """Log `NOTICE` as a warning, once in this process. Without a logging configuration it goes to standard
    error."""
    log.warning(NOTICE)
