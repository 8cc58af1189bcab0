"""What a step drafts: nothing, a chain or a tree, and how many nodes. Pure, without torch.

One policy is current for the whole process. The DDTREE worker reads it once per step; the step gate
sets it at a boundary, on every rank at the same iteration, so all ranks of a replica always draft
alike. It is a fixed one, or the rule that each step's is to be chosen (`overstory.workers.policy`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Mode = Literal["plain", "chain", "tree"]

_NODES = re.compile(r"(tree|spine)-([1-9][0-9]*)")
_AUTO = re.compile(r"auto(?:<=([1-9][0-9]*))?")


@dataclass(frozen=True)
class TreePolicy:
    """How many nodes to draft per request and step, and in which shape.

    Attributes:
        mode: ``plain`` drafts nothing, ``chain`` the drafter's most likely block in one line,
            ``tree`` the most probable paths, best first.
        nodes: drafted nodes without the root; only with ``tree``, 0 otherwise.
        spine_first: keep the whole most likely line before any branch; only with ``tree``.

    Raises:
        ValueError: the fields contradict each other.
    """

    mode: Mode
    nodes: int = 0
    spine_first: bool = False

    def __post_init__(self) -> None:
        if self.mode not in ("plain", "chain", "tree"):
            raise ValueError(f"tree policy mode must be plain, chain or tree, got {self.mode!r}")
        if self.mode == "tree":
            if self.nodes < 1:
                raise ValueError(
                    f"a tree policy needs at least 1 node, got {self.nodes}; use 'plain'"
                )
        elif self.nodes or self.spine_first:
            raise ValueError(
                f"policy {self.mode!r} takes neither nodes ({self.nodes}) nor spine_first "
                f"({self.spine_first}): its shape follows from the drafter's block size"
            )

    @classmethod
    def parse(cls, text: str) -> TreePolicy:
        """Policy from its name: ``plain``, ``chain``, ``tree-31`` or ``spine-31``.

        Raises:
            ValueError: the text is none of these.
        """
        name = text.strip().lower()
        if name == "plain":
            return cls("plain")
        if name == "chain":
            return cls("chain")
        match = _NODES.fullmatch(name)
        if match is None:
            raise ValueError(
                f"unknown tree policy {text!r}: use 'plain', 'chain', 'tree-N' or 'spine-N' "
                "with N drafted nodes, for example 'tree-31'"
            )
        return cls("tree", int(match.group(2)), spine_first=match.group(1) == "spine")

    def __str__(self) -> str:
        if self.mode != "tree":
            return self.mode
        return f"{'spine' if self.spine_first else 'tree'}-{self.nodes}"

    def drafted_nodes(self, block_size: int) -> int:
        """Rows of a verify step beyond the root, for a drafter of ``block_size`` positions."""
        if self.mode == "plain":
            return 0
        return block_size - 1 if self.mode == "chain" else self.nodes


@dataclass(frozen=True)
class AutoPolicy:
    """Each step takes plain, the chain or a tree, whichever gives most tokens per millisecond.

    Attributes:
        most: bound on the drafted nodes of a step, the chain's included; None: the engine's room.
    """

    most: int | None = None

    def __str__(self) -> str:
        return "auto" if self.most is None else f"auto<={self.most}"

    def drafted_nodes(self, block_size: int) -> int:
        """Most nodes of a step as far as the rule itself says."""
        del block_size
        return self.most or 0


Policy = TreePolicy | AutoPolicy


def parse_policy(text: str) -> Policy:
    """As `TreePolicy.parse`, and ``auto`` or ``auto<=31``.

    Raises:
        ValueError: the text is none of these.
    """
    match = _AUTO.fullmatch(text.strip().lower())
    if match is not None:
        return AutoPolicy(int(match.group(1)) if match.group(1) else None)
    try:
        return TreePolicy.parse(text)
    except ValueError as error:
        raise ValueError(f"{error}; 'auto' and 'auto<=N' choose for each step") from None


def policy_from_budget(budget: int, block_size: int, spine_first: bool = False) -> TreePolicy:
    """Policy that a node budget stands for: 0 is plain, ``block_size - 1`` the chain, else a tree.

    A budget of ``block_size - 1`` nodes with ``spine_first`` is the chain by definition.

    Raises:
        ValueError: negative budget, or a block size that drafts nothing.
    """
    if block_size < 2:
        raise ValueError(f"the drafter's block size must be at least 2, got {block_size}")
    if budget < 0:
        raise ValueError(f"tree budget must be 0 (plain) or more nodes, got {budget}")
    if budget == 0:
        return TreePolicy("plain")
    if budget == block_size - 1:
        return TreePolicy("chain")
    return TreePolicy("tree", budget, spine_first)


class PolicyHolder:
    """The policy of one process with the largest one its engine has room for."""

    def __init__(self) -> None:
        self._current: Policy = TreePolicy("plain")
        self._block_size = 0
        self._max_nodes = 0
        self.automatic = False

    def start(
        self, policy: Policy, block_size: int, max_nodes: int, automatic: bool = False
    ) -> None:
        """An engine starts with ``policy`` and has room for ``max_nodes``; it replaces any before.

        ``automatic``: it has or will have a cost table before its first step.

        Raises:
            ValueError: the policy does not fit.
        """
        before = self._block_size, self._max_nodes, self.automatic
        self._block_size, self._max_nodes, self.automatic = block_size, max_nodes, automatic
        try:
            self.set_current(policy)
        except ValueError:
            self._block_size, self._max_nodes, self.automatic = before
            raise

    def current(self) -> Policy:
        """The policy of the next step."""
        return self._current

    def set_current(self, policy: Policy) -> None:
        """Use ``policy`` from the next step on.

        Raises:
            ValueError: it drafts more nodes than the engine has room for.
        """
        self.check(policy)
        self._current = policy

    def check(self, policy: Policy) -> None:
        """Refuses a policy that drafts more nodes than the engine has room for, and the automatic
        one where there is no cost table to choose by (ValueError)."""
        if not self._block_size:
            return
        if isinstance(policy, AutoPolicy) and not self.automatic:
            raise ValueError(
                f"tree policy {str(policy)!r} chooses by a cost table, which this engine has not "
                "measured: deploy with tree.policy: auto"
            )
        nodes = policy.drafted_nodes(self._block_size)
        if nodes > self._max_nodes:
            raise ValueError(
                f"tree policy {str(policy)!r} drafts {nodes} nodes, but this engine was started "
                f"for at most {self._max_nodes}: start it with a larger tree budget"
            )


HOLDER = PolicyHolder()


def current() -> Policy:
    """The policy of this process's next step (``plain`` before an engine has started)."""
    return HOLDER.current()


def set_current(policy: Policy) -> None:
    """Set the policy from the next step on; ValueError if the engine has no room for it."""
    HOLDER.set_current(policy)


def check(policy: Policy) -> None:
    """Refuses a policy that `set_current` would refuse, without setting it (ValueError)."""
    HOLDER.check(policy)
