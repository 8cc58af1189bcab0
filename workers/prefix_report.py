"""What a rank's prefix cache holds, as hashes of blocks: read from SGLang's radix tree.

The tree belongs to the scheduler's loop; this reads it from another thread, without a lock. What a
node is split or evicted under its eyes can give a wrong hash, which misleads a router for one
report and nothing else. Every node's hashes are kept, so that a walk looks at new tokens only.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from dataclasses import dataclass
from typing import Any

from overstory.orchestrator.prefix_blocks import BLOCK_TOKENS, next_block

MOST_BLOCKS = 1 << 16
"""Of a report; beginnings come first."""


Version = tuple[int, int, int]
"""Of a cache's content: batches launched, tokens that could be evicted, tokens in use."""


@dataclass(frozen=True, slots=True)
class PrefixReport:
    """Hashes of the blocks that a cache holds (`overstory.orchestrator.prefix_blocks`); None for a
    cache that is no radix tree."""

    version: Version
    hashes: array[int] | None


@dataclass(frozen=True, slots=True)
class _Ends:
    """Where a node's tokens end: hash of the last whole block, and the tokens after it."""

    seen: int = 0
    rest: tuple[int, ...] = ()


@dataclass(slots=True)
class _Known:
    """A node as it was last seen: what it began from, how many tokens it had, what came of it."""

    begun: _Ends
    length: int
    hashes: tuple[int, ...]
    ends: _Ends


class PrefixReader:
    """Reads one radix tree again and again. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[int, _Known] = {}

    def report(self, cache: Any, forwards: int, known: Version | None) -> PrefixReport | None:
        """What SGLang's prefix cache holds now; None if that is what it held at `known`.

        Args:
            cache: of the scheduler.
            forwards: batches that it has launched.
            known: version of the last report that the caller has.
        """
        root = radix_root(cache)
        if root is None:
            return PrefixReport((forwards, 0, 0), None)
        version = (forwards, int(cache.evictable_size()), int(cache.protected_size()))
        if version == known:
            return None
        with self._lock:
            return PrefixReport(version, self.read(root))

    def read(self, root: Any) -> array[int]:
        """Hashes of all blocks below SGLang's root node, those of beginnings first."""
        found: array[int] = array("q")
        known: dict[int, _Known] = {}
        waiting = deque((child, _Ends()) for child in _children(root))
        while waiting and len(found) < MOST_BLOCKS:
            node, begun = waiting.popleft()
            if node.value is None and not node.backuped:
                continue  # evicted while its parent was looked at
            seen = known[node.id] = self._node(node, begun)
            found.extend(seen.hashes)
            waiting.extend((child, seen.ends) for child in _children(node))
        self._known = known
        return found[:MOST_BLOCKS]

    def _node(self, node: Any, begun: _Ends) -> _Known:
        ids = node.key.raw_token_ids()
        before = self._known.get(node.id)
        if before is not None and before.length == len(ids) and before.begun == begun:
            return before
        tokens = (*begun.rest, *ids)
        seen, hashes, at = begun.seen, [], 0
        while at + BLOCK_TOKENS <= len(tokens):
            seen = next_block(seen, tokens[at : at + BLOCK_TOKENS])
            hashes.append(seen)
            at += BLOCK_TOKENS
        return _Known(begun, len(ids), tuple(hashes), _Ends(seen, tokens[at:]))


def _children(node: Any) -> list[Any]:
    """Of requests without an extra key (adapters, salts), as all of the gateway's are."""
    return [child for child in list(node.children.values()) if not child.key.extra_key]


def radix_root(cache: Any) -> Any | None:
    """The root of a cache that is a radix tree of tokens; None for any other kind."""
    root = getattr(cache, "root_node", None)
    plain = root is not None and hasattr(root, "children") and not getattr(cache, "is_eagle", False)
    return root if plain and not getattr(cache, "disable", False) else None
