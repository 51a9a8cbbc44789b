"""Conservation checks: every count that the cache keeps, compared with a recount from scratch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ramify.radix.eviction import Usage
from ramify.radix.key import TOKEN_BYTES, first_token
from ramify.radix.lease import LeaseBook
from ramify.radix.lock import PrefixLock
from ramify.radix.node import Node, Root
from ramify.radix.states import States
from ramify.radix.tree import RadixTree


class ConservationError(RuntimeError):
    """Raised for counts that contradict each other: a defect in the cache, or a caller that broke its
    rules."""


def verify(
    tree: RadixTree,
    usage: Usage,
    num_pages: int,
    free: list[int],
    leases: LeaseBook,
    private: set[int],
    locks: Iterable[PrefixLock],
    states: States,
) -> None:
    """Raise `ConservationError` naming every violation. Costs O(tokens and pages in the tree)."""
    nodes = list(tree.nodes())
    wrong: list[str] = []
    for node in nodes:
        wrong += _shape(node, tree.page_size)
    wrong += _ownership(nodes, num_pages, free, private)
    wrong += _claims(nodes, leases, locks)
    wrong += _usage(nodes, usage)
    wrong += _states(nodes, states)
    for lock in locks:
        wrong += _lock(lock, tree)
    if wrong:
        raise ConservationError("; ".join(wrong))


def _name(node: Node) -> str:
    return f"node [{node.start}, {node.end})"


def _shape(node: Node, page_size: int) -> list[str]:
    wrong = []
    parent = node.parent
    if isinstance(node, Root):
        if parent is not None or node.tokens or node.pages or not (node.children or node.locks):
            wrong.append(f"the root of scope {node.scope!r} is not an empty prefix that somebody needs")
    elif parent is None:
        wrong.append(f"{_name(node)} is reachable but has no parent")
    else:
        slots = -(-node.end // page_size) - node.start // page_size
        if not node.tokens or len(node.tokens) % TOKEN_BYTES or node.start != parent.end:
            wrong.append(f"{_name(node)} does not continue its parent, {_name(parent)}")
        if len(node.pages) != slots:
            wrong.append(f"{_name(node)} has {len(node.pages)} pages for {slots} slots")
        if node.borrows_head and not _is_lent(node, page_size):
            wrong.append(f"{_name(node)} borrows page {node.pages[0]} that no ancestor has in that slot")
        if node.last_used > parent.last_used:
            wrong.append(f"{_name(node)} was used after its parent")
    for first, child in node.children.items():
        if child.parent is not node or first_token(child.tokens) != first:
            wrong.append(f"{_name(child)} is misfiled under {_name(node)}")
    return wrong


def _is_lent(node: Node, page_size: int) -> bool:
    """Whether an ancestor owns the first page of `node` and has it in the same slot."""
    slot = node.start // page_size
    step = node.parent
    while step is not None and step.pages and -(-step.end // page_size) - 1 == slot:
        if step.pages[-1] == node.pages[0] and (len(step.pages) > 1 or not step.borrows_head):
            return True
        step = step.parent
    return False


def _ownership(nodes: list[Node], num_pages: int, free: list[int], private: set[int]) -> list[str]:
    """Check that every page is either free, or private, or owned by exactly one node."""
    owners: Counter[int] = Counter(free)
    owners.update(private)
    for node in nodes:
        owners.update(node.owned_pages)
    lost = [page for page in range(num_pages) if not owners[page]]
    twice = [page for page, count in owners.items() if count > 1]
    wrong = [f"pages {lost} are nowhere"] if lost else []
    if twice:
        wrong.append(f"pages {sorted(twice)} are in two places")
    if len(owners) - len(lost) > num_pages:
        wrong.append("there are pages that the pool does not know")
    return wrong


def _states(nodes: list[Node], states: States) -> list[str]:
    """Check that every slot is either free, or in use by a request, or held by exactly one node, and no
    root."""
    holders = {node: node.state for node in nodes if node.state is not None}
    slots = Counter([*states.free_slots, *states.in_use, *(state.slot for state in holders.values())])
    wrong = [] if holders == states.holders else [f"{len(holders)} nodes hold {len(states.holders)} states"]
    if any(isinstance(node, Root) for node in holders):
        wrong.append("a root holds a state")
    if slots != Counter(range(states.total)):
        wrong.append(f"{len(slots)} of {states.total} state slots are somewhere, in {slots.total()} places")
    return wrong


def _claims(nodes: list[Node], leases: LeaseBook, locks: Iterable[PrefixLock]) -> list[str]:
    """Check that a node's counts of locks, leases and pins equal those that end there or below."""
    locked: Counter[Node | None] = Counter(lock.node for lock in locks)
    leased = Counter({node: leases.at(node) for node in nodes if leases.at(node)})
    pinned: Counter[Node | None] = Counter({node: leases.pins_at(node) for node in leased})
    wrong = []
    if leased.total() != len(leases):
        wrong.append(f"{len(leases)} leases, {leased.total()} of them on nodes of the tree")
    for node in reversed(nodes):  # children first
        if (node.locks, node.leases, node.pins) != (locked[node], leased[node], pinned[node]):
            wrong.append(
                f"{_name(node)} counts {node.locks} locks, {node.leases} leases and {node.pins} pins;"
                f" it has {locked[node]}, {leased[node]} and {pinned[node]}"
            )
        if node.parent is not None:
            locked[node.parent] += locked[node]
            leased[node.parent] += leased[node]
            pinned[node.parent] += pinned[node]
    return wrong


def _usage(nodes: list[Node], usage: Usage) -> list[str]:
    pages: Counter[str] = Counter()
    for node in nodes:
        idle_as = "pinned" if node.pins else "leased" if node.leases else "evictable"
        pages["locked" if node.locks else idle_as] += node.owned
        pages["held"] += node.owned if node.pins else 0
    wrong = [
        f"{counted} pages counted as {state}, {pages[state]} are"
        for state, counted in (
            ("locked", usage.locked_pages),
            ("pinned", usage.pinned_pages),
            ("held", usage.held_pages),
            ("leased", usage.leased_pages),
            ("evictable", usage.evictable_pages),
        )
        if counted != pages[state]
    ]
    idle = {node for node in nodes if node.parent is not None and not node.locks and not node.children}
    queued = {node for node in nodes if node.queue_entry}
    if idle != queued or len(idle) != len(usage.queue):
        wrong.append(f"{len(usage.queue)} leaves are queued for eviction, {len(idle)} can be evicted")
    wrong += [f"{_name(node)} is queued as if its lease were different" for node in usage.queue.misfiled()]
    return wrong


def _lock(lock: PrefixLock, tree: RadixTree) -> list[str]:
    """Check that the pages of the lock's whole slots are those of its path. A partial last slot may have
    another page: the page that the path had when the lock was taken, or a private one."""
    node = lock.node
    if node is None or node.end != lock.length:
        return [f"a lock of {lock.length} tokens is on {'nothing' if node is None else _name(node)}"]
    whole = lock.length // tree.page_size
    wrong = []
    if lock.pages[:whole] != tree.path_pages(node)[:whole]:
        wrong.append(f"the pages of a lock on {_name(node)} are not those of its path")
    if lock.private_from not in (whole, -(-lock.length // tree.page_size)):
        wrong.append(f"a lock of {lock.length} tokens has private pages from slot {lock.private_from} on")
    return wrong
