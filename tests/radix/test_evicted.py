"""The record of evictions: which request took the pages of a prompt."""

from __future__ import annotations

import random

import numpy as np

from ramify.radix.cache import FLUSH, PrefixCache
from ramify.radix.evicted import EvictionRecord


def put(cache: PrefixCache, tokens: list[int], scope: str = "", taker: str = "") -> None:
    """A request from its match to its end."""
    ids = np.array(tokens, np.int32)
    lock = cache.acquire(cache.match(ids, scope))
    full = lock.length // cache.page_size
    fresh = cache.allocate(-(-len(tokens) // cache.page_size) - full, taker)
    assert fresh is not None
    pages = cache.commit(lock, ids, lock.pages[:full] + fresh)
    cache.free(pages[lock.private_from :])
    cache.release(lock)
    cache.check()


def lost(cache: PrefixCache, tokens: list[int], scope: str = "") -> tuple[int, str]:
    ids = np.array(tokens, np.int32)
    return cache.lost(ids, scope, cache.match(ids, scope).length)


def words(count: int, seed: int) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(-100, 1000) for _ in range(count)]


def test_a_prompt_is_told_who_took_its_pages() -> None:
    cache = PrefixCache(8, 4)
    first, second = words(32, 1), words(12, 2)
    put(cache, first)
    assert lost(cache, first) == (0, "")
    assert lost(cache, words(32, 3)) == (0, "")
    put(cache, second, taker="b")
    assert cache.match(first).length == 20
    assert lost(cache, first) == (12, "b")
    assert lost(cache, [*first[:30], 5000, 5001]) == (10, "b"), "only what it shares"
    assert lost(cache, [*first[:20], *words(12, 4)]) == (0, "")
    assert lost(cache, first, "other scope") == (0, "")


def test_most_of_the_tokens_decide_whose_need_it_was() -> None:
    cache = PrefixCache(10, 4)
    first = words(40, 1)
    put(cache, first)
    for page, taker in enumerate("abbbc"):
        pages = cache.allocate(1, taker)
        assert pages is not None
        cache.check()
        assert cache.match(np.array(first, np.int32)).length == 36 - 4 * page
    assert lost(cache, first) == (20, "b")


def test_it_sees_through_cuts_and_joins() -> None:
    """Nodes are split where branches leave them and joined when branches are gone; digests stay the same."""
    cache = PrefixCache(64, 4)
    trunk = words(50, 1)
    for cut in (10, 21, 33, 47):
        put(cache, [*trunk[:cut], *words(9, cut)])
    put(cache, trunk)
    cache.flush()
    for cut in (10, 21, 33, 47):
        assert lost(cache, [*trunk[:cut], *words(9, cut)]) == (cut + 9, FLUSH)
    assert lost(cache, trunk) == (50, FLUSH)


def test_what_was_computed_again_is_not_lost() -> None:
    cache = PrefixCache(16, 4)
    first = words(32, 1)
    put(cache, first)
    cache.flush()
    assert lost(cache, first) == (32, FLUSH)
    put(cache, first)
    assert lost(cache, first) == (0, "")
    pages = cache.allocate(10, "later")
    assert pages is not None
    assert lost(cache, first) == (8, "later")


def test_the_record_is_bounded() -> None:
    cache = PrefixCache(64, 4)
    cache.record = EvictionRecord(max_tokens=64)
    prompts = [words(20, seed) for seed in range(10)]
    for prompt in prompts:
        put(cache, prompt)
    cache.flush()
    assert [lost(cache, prompt)[0] for prompt in prompts] == [0] * 7 + [20] * 3
    assert cache.record.tokens == 60


def test_it_never_tells_of_what_was_not_there_and_seldom_forgets() -> None:
    """Against a list of everything committed, in a cache that evicts all the time."""
    told = missing = 0
    for seed in range(20):
        dice = random.Random(seed)
        cache = PrefixCache(12, dice.choice((1, 3, 4)))
        known: set[tuple[int, ...]] = set()
        for number in range(120):
            tokens = [dice.randrange(3) for _ in range(dice.randrange(1, 3 * cache.page_size + 1))]
            count, taker = lost(cache, tokens)
            found = cache.match(np.array(tokens, np.int32)).length
            assert (count > 0) == (taker != "")
            prefixes = [tuple(tokens[: end + 1]) for end in range(len(tokens))]
            assert known.issuperset(prefixes[: found + count])
            told += count
            missing += sum(prefix in known for prefix in prefixes) - found
            put(cache, tokens, taker=f"t{number}")
            known.update(prefixes)
    assert told > 0.7 * missing, "an edge takes the place of an earlier one that began alike"
