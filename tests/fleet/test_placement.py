"""Placement: forks stay together if that is cheaper; slow replicas get little; scopes are apart."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest

from ramify.engine_messages import TreeChange
from ramify.radix.cache import PrefixCache
from ramify.radix.digest import Digests
from ramify.radix.tree_log import TreeLog
from ramify.runtime.fleet.index import PrefixIndex
from ramify.runtime.fleet.placement import NoReplica, Placement, Work

PAGE = 16
DIGESTS = Digests()
NUMBERS = itertools.count()


def tokens(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, count).astype(np.int32)


def work(ids: np.ndarray, *, output: float = 16, program: str = "", scope: str = "") -> Work:
    digests = DIGESTS.page_ends(ids, scope, PAGE)
    return Work(f"r{next(NUMBERS)}", digests, len(ids), output, program)


def fleet(*replicas: str) -> Placement:
    placement = Placement(PAGE)
    for replica in replicas or ("a", "b"):
        placement.join(replica)
    return placement


def change(
    number: int,
    added: Sequence[int] = (),
    removed: Sequence[int] = (),
    *,
    epoch: int = 7,
    whole: bool = False,
) -> TreeChange:
    return TreeChange(epoch=epoch, number=number, added=tuple(added), removed=tuple(removed), whole=whole)


def test_a_gap_asks_for_the_whole() -> None:
    index = PrefixIndex()
    index.join("a")
    assert index.apply("a", change(1, [1, 2]))
    assert not index.apply("a", change(3, [4]))
    assert index.apply("a", change(4, [1, 2, 3, 4], whole=True))
    assert index.apply("a", change(4, removed=[1])), "the whole had that"
    assert index.apply("a", change(5, removed=[4]))
    assert index.pages([1, 2, 3, 4, 5]) == {"a": 3}


def test_a_new_life_forgets_the_old_one() -> None:
    index = PrefixIndex()
    index.join("a")
    index.apply("a", change(1, [1, 2]))
    assert index.apply("a", change(1, [9], epoch=8))
    assert index.pages([1, 2]) == {}
    assert not index.apply("a", change(2, epoch=9)), "its first events were lost"


@pytest.mark.parametrize("seed", range(3))
def test_random_trees_are_found_as_they_are(seed: int) -> None:
    """The index equals the tree, although some events are lost and whole trees are sent instead."""
    draw = random.Random(seed)
    log = TreeLog(PAGE)
    cache = PrefixCache(120, PAGE, log=log)
    index = PrefixIndex()
    index.join("a")
    texts = [tokens(draw.randrange(4), 300) for _ in range(12)]
    for text in texts:
        text[draw.randrange(300) :] = tokens(draw.randrange(1000), 1)
    sent = itertools.count(1)
    for step in range(200):
        text, scope = draw.choice(texts)[: draw.randint(1, 300)], draw.choice(["", "x"])
        lock = cache.acquire(cache.match(text, scope))
        new = cache.allocate(-(-len(text) // PAGE) - lock.length // PAGE)
        if new is not None:
            cache.commit(lock, text, lock.pages[: lock.length // PAGE] + new)
            cache.free(new[-1:] if lock.private_from < len(lock.pages) else [])
        cache.release(lock)
        if draw.random() < 0.02:
            cache.flush()
        pages, removed = log.take()
        added = [page.digest for page in pages]
        number = next(sent)
        lost = draw.random() < 0.1
        if lost or not index.apply("a", change(number, added, removed)):
            held = [page.digest for page in log.whole(cache.tree.nodes())]
            index.apply("a", change(number, held, whole=True))
        if step % 10 == 0:
            for text, scope in itertools.product(texts, ["", "x"]):
                found = index.pages(DIGESTS.page_ends(text, scope, PAGE)).get("a", 0)
                assert found == cache.match(text, scope).length // PAGE


def test_the_siblings_of_a_fork_share_what_one_computes() -> None:
    placement, prefix = fleet(), tokens(1, 4000)
    siblings = [work(np.concatenate([prefix, tokens(2 + i, 40)]), program="p") for i in range(8)]
    assert len({placement.place(one, 0.0) for one in siblings}) == 1
    computed = 4000 + 8 * 40
    assert placement.work_of("a") + placement.work_of("b") == pytest.approx(computed, abs=8 * (PAGE + 16))


def test_a_fork_is_split_where_the_queue_is_longer_than_the_prefix() -> None:
    placement, prefix = fleet(), tokens(1, 320)
    siblings = [work(np.concatenate([prefix, tokens(2 + i, 900)]), program="p") for i in range(8)]
    assert {placement.place(one, 0.0) for one in siblings} == {"a", "b"}


def test_a_program_stays_where_its_pages_are() -> None:
    placement, text = fleet(), tokens(1, 2000)
    first = placement.place(work(text, program="p"), 0.0)
    placement.apply(first, change(1, DIGESTS.page_ends(text, "", PAGE)))
    for _ in range(6):  # others keep it busier than the other one, by less than the prefix
        placement.place(work(tokens(next(NUMBERS) + 100, 100), output=1), 0.0)
    assert placement.place(work(np.concatenate([text, tokens(2, 100)]), program="p"), 0.0) == first


@pytest.mark.parametrize(("move_s", "home"), [(0.2, "b"), (2.0, "a"), (None, "a")])
def test_a_new_replica_gets_work_where_its_pages_come_sooner_than_its_turn(
    move_s: float | None, home: str
) -> None:
    """Replica a has 800 tokens of work, at 1 ms a token, and 2,000 of the prompt's 2,010 tokens."""
    placement, text = fleet("a"), tokens(1, 2010)
    placement.apply("a", change(1, DIGESTS.page_ends(text, "", PAGE)))
    placement._pace.learn(1.0, 1000, 0.0)
    for seed in range(8):
        placement.place(work(tokens(100 + seed, 100), output=0), 0.0)
    placement.join("b")
    asked: list[int] = []

    def seconds(pages: int) -> float:
        asked.append(pages)
        return move_s or 0.0

    one = work(text, output=0)
    assert placement.place(one, 0.0, move_s=None if move_s is None else seconds) == home
    assert set(asked) == (set() if move_s is None else {125})
    if home == "b":
        placement.fetched(one.rid, 2000, 0.3)
        assert placement.work_of("b") == pytest.approx(10)
    short = np.concatenate([text[:48], tokens(3, 600)])
    asked.clear()
    placement.place(work(short), 0.0, move_s=seconds)
    assert not asked, "48 tokens are not moved"


def test_simultaneous_requests_see_each_other() -> None:
    placement = fleet("a", "b", "c", "d")
    for i in range(32):
        placement.place(work(tokens(i, 500)), 0.0)
    works = [placement.work_of(one) for one in "abcd"]
    assert works == pytest.approx([works[0]] * 4)
    assert works[0] >= 8 * 500


def test_scopes_never_share() -> None:
    placement, text = fleet(), tokens(1, 2000)
    placement.apply("a", change(1, DIGESTS.page_ends(text, "one", PAGE)))
    placement.place(work(tokens(2, 300)), 0.0)  # a is the busier one
    assert placement.place(work(text, scope="one"), 0.0) == "a"
    assert placement.place(work(text, scope="two"), 0.0) == "b"


def test_a_slow_replica_attracts_no_misses() -> None:
    """A replica ten times slower than the other gets about a tenth of the work, although it looks as idle."""
    placement, paces = fleet(), {"a": 1e-3, "b": 1e-4}
    busy_until = dict.fromkeys("ab", 0.0)
    placed = {"a": 0, "b": 0}
    running: list[tuple[float, str]] = []
    now = 0.0
    for i in range(400):
        now += 0.03
        for done, rid in sorted(running):
            if done <= now:
                placement.progress(rid, 1, done)
                placement.ended(rid)
        running = [one for one in running if one[0] > now]
        one = work(tokens(i, 200), output=1)
        name = placement.place(one, now)
        placed[name] += 1
        busy_until[name] = max(now, busy_until[name]) + 200 * paces[name]
        running.append((busy_until[name], one.rid))
    assert placed["a"] < placed["b"] / 5


@pytest.mark.parametrize(("slow", "after_s"), [(1, 1.0), (2, 60.0)])
def test_a_slow_start_and_a_slow_moment_are_forgotten(slow: int, after_s: float) -> None:
    """The first answers of `b` take a hundred times as long as those of `a`. After one slow answer, `b` gets
    work at once; after two, a minute later."""
    placement = fleet()
    for i in range(20):
        one = work(tokens(i, 200))
        seconds = 2.0 if placement.place(one, float(i), "b" if i < slow else "a") == "b" else 0.02
        placement.progress(one.rid, 1, i + seconds)
        placement.ended(one.rid)
    busy = work(tokens(100, 200), output=9000)
    now = 21.0 + after_s
    placement.place(busy, now, "a")
    placement.progress(busy.rid, 1, now + 0.02)
    assert placement.place(work(tokens(101, 200)), now + 0.03) == "b"


def test_a_slow_start_says_nothing_of_the_fleet() -> None:
    placement = fleet()
    for i in range(4):
        one = work(tokens(i, 200))
        seconds = 2.0 if placement.place(one, float(i), "b" if i == 3 else "a") == "b" else 0.02
        placement.progress(one.rid, 1, i + seconds)
        placement.ended(one.rid)
    placement.join("c")
    assert placement.pace("c", 10.0) == pytest.approx(placement.pace("a", 10.0))


def test_a_replica_that_no_longer_answers_is_left_alone() -> None:
    placement = fleet()
    for i, now in enumerate(np.arange(0.0, 20.0, 0.05)):
        one = work(tokens(i, 200), output=1)
        if placement.place(one, float(now)) == "b":
            placement.progress(one.rid, 1, float(now) + 0.02)
            placement.ended(one.rid)
    assert placement.work_of("a") < 5 * 200


def test_the_work_of_one_that_leaves_goes_to_the_others() -> None:
    placement = fleet()
    given = [work(tokens(i, 100), program=f"p{i}") for i in range(10)]
    lost = [one for one in given if placement.place(one, 0.0) == "a"]
    placement.leave("a")
    assert {placement.place(one, 0.0) for one in lost} == {"b"}
    placement.drain("b")
    with pytest.raises(NoReplica):
        placement.place(given[0], 0.0)


@pytest.mark.parametrize("seed", range(3))
def test_replicas_that_come_and_go_keep_the_sums_right(seed: int) -> None:
    """After random joins, drains, deaths and requests, each sum of work equals a recount."""
    draw = random.Random(seed)
    placement = Placement(PAGE)
    texts = [tokens(i, 200) for i in range(6)]
    states: dict[str, str] = {}
    placed: dict[str, str] = {}
    names = itertools.count()
    for step in range(400):
        what = draw.random()
        if what < 0.1 and len(states) < 6:
            name = f"r{next(names)}"
            placement.join(name)
            states[name] = "up"
        elif what < 0.14 and states:
            name = draw.choice(list(states))
            states[name] = "draining" if draw.random() < 0.7 else "up"
            (placement.drain if states[name] == "draining" else placement.undrain)(name)
        elif what < 0.18 and states:
            name = draw.choice(list(states))
            del states[name]
            placement.leave(name)
            placed = {rid: home for rid, home in placed.items() if home != name}
        elif what < 0.3 and states:
            name = draw.choice(list(states))
            ends = DIGESTS.page_ends(draw.choice(texts), "", PAGE)
            placement.apply(name, change(1, ends, whole=True))
        elif what < 0.6 and placed:
            rid = draw.choice(list(placed))
            placement.progress(rid, draw.randint(1, 20), float(step))
            if draw.random() < 0.7:
                placement.ended(rid)
                del placed[rid]
        else:
            one = work(draw.choice(texts)[: draw.randint(20, 200)], program=draw.choice(["", "p", "q"]))
            usable = {name for name, state in states.items() if state == "up"}
            if usable:
                name = placement.place(one, float(step))
                assert name in usable
                placed[one.rid] = name
            else:
                with pytest.raises(NoReplica):
                    placement.place(one, float(step))
        assert set(placement._reservations) == set(placed)
        for name in states:
            own = [placement._reservations[rid] for rid, home in placed.items() if home == name]
            assert placement.work_of(name) == pytest.approx(sum(one.prompt + one.output for one in own))


def test_ended_work_leaves_nothing() -> None:
    placement = fleet()
    for i in range(600):
        one = work(tokens(i, 64))
        placement.place(one, 0.0)
        placement.progress(one.rid, 5, 1.0)
        placement.ended(one.rid)
        placement.progress(one.rid, 1, 2.0)  # late
    assert placement.work_of("a") + placement.work_of("b") == pytest.approx(0.0)
    assert len(placement._index._promised) <= 2 * 256 * 4
    assert not placement._reservations
