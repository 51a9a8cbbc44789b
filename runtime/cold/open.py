"""The stores that an engine's options ask for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from ramify.errors import UnsupportedField
from ramify.runtime.cold.checks import host_kv_on_cpu
from ramify.runtime.cold.files import FileStore
from ramify.runtime.cold.memory import MemoryStore
from ramify.runtime.cold.store import ColdStore
from ramify.runtime.config import COLD_GB, EngineConfig
from ramify.runtime.executor.kv_pool import KvPool

log = logging.getLogger("ramify")


def open_stores(
    config: EngineConfig, pool: KvPool, identity: Callable[[], str], *, states: bool
) -> list[ColdStore]:
    """The stores of the cold tier, the fastest first; empty without `cold_dir` and `host_kv_gb`.

    A folder that cannot be used costs a line in the log and its store. Raises `UnsupportedField` for a model
    with `states` of linear attention layers, and for `host_kv_gb` on a device whose memory is the host's.
    """
    stores: list[ColdStore] = []
    asked = [name for name in ("cold_dir", "host_kv_gb") if getattr(config, name) is not None]
    if asked and states:
        raise UnsupportedField(
            f"{asked[0]} is set: the states of linear attention layers are not kept beside their pages.",
            field=asked[0],
            remedy=f"Leave out {asked[0]} for this model.",
        )
    if config.host_kv_gb is not None:
        if pool.k.device.type != "cuda":
            raise host_kv_on_cpu(config)
        most = int(config.host_kv_gb * (1 << 30))
        stores.append(
            MemoryStore(page_size=pool.page_size, page_bytes=pool.page_bytes, most_bytes=most, pinned=True)
        )
    if config.cold_dir is not None:
        try:
            store = FileStore(
                Path(config.cold_dir).expanduser(),
                identity(),
                page_size=pool.page_size,
                page_bytes=pool.page_bytes,
                most_bytes=int((config.cold_gb or COLD_GB) * (1 << 30)),
            )
            stores.append(store)
            log.info("the cold tier has %d segments in %s", len(store.index.segments), store.path)
        except OSError as error:
            log.error("there is no cold tier: cold_dir %s cannot be used: %s", config.cold_dir, error)
    if not all(each.most_pages for each in stores):
        log.warning("a store of the cold tier holds nothing: a KV page has %d bytes", pool.page_bytes)
    return stores
