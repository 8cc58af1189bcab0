"""The automatic tree policy on a slice's real steps, against each fixed one.

A slice's drafter is of random weights and gets nothing accepted, so acceptance is simulated: the
drafter is sure of its best candidate by a given chance, and right about all its chances. Steps are
the engine's, their times real; what a step yields is the mean of its policy, the same for the
automatic policy and the fixed ones, so that no luck of the draw is in the comparison.

Trials of other options are part of what the policy costs, and come in runs of five steps: in a few
dozen steps one of them is a tenth, or none is there at all. So many steps are timed, all count, and
what was learnt first at a batch size is told apart.
"""

from __future__ import annotations

import functools
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

SURE = {"fits": 0.83, "fits badly": 0.3}
"""Chance of the best candidate: a chain of 7 then yields 4.6 tokens a step, or 1.4."""
FALL = 0.6
"""Each further candidate of a position has so much of the chance of the one before."""
WIDTH = 8
LEARNING_S = 4.0
LEARNING_STEPS, SETTLING_STEPS = 192, 32
"""Before the first point of a batch size, and before each other one: learning goes on by batch."""
ROUNDS = 2
BLOCK = 64
"""Steps under the automatic policy in a round."""
FIXED_BLOCK = 16
"""Of each leader among the fixed ones, in a round."""
SAMPLE, LEADERS = 4, 2
"""Steps of every fixed policy, by which the leaders are found; and how many these are."""


@functools.cache
def chances(sure: float) -> tuple[float, ...]:
    """Probability of each candidate of a position; they add up to 1."""
    rest = [FALL**rank for rank in range(1, WIDTH)]
    return (sure, *((1 - sure) * share / sum(rest) for share in rest))


class Drafts:
    """What becomes of drafts under each of an engine's options.

    Args:
        options: of the engine.
        depth: drafted positions.
        sure: chance of the best candidate.
    """

    def __init__(self, options: Any, depth: int, sure: float) -> None:
        import torch

        from overstory.kernels.reference import chain_tree, tree_build
        from overstory.workers.policy.options import CHAIN

        self.options, self._depth, self._sure = options, depth, sure
        root = torch.zeros(1, dtype=torch.int64)
        tokens = torch.arange(1, 1 + depth * WIDTH).view(1, depth, WIDTH)
        logs = torch.tensor(chances(sure)).log().expand(1, depth, WIDTH).contiguous()
        self._trees = [None]
        for option in range(1, len(options)):
            chain = option == CHAIN
            tree = (
                chain_tree(root, tokens[:, :, 0])
                if chain
                else tree_build(root, logs, tokens, options.nodes[option])
            )
            self._trees.append((tree, tree.parents[0].tolist(), tree.ranks[0].tolist(), chain))

    def walk(self, option: int, dice: random.Random) -> Any:
        """One step's walk; None where nothing is drafted."""
        from overstory.workers.policy.evidence import Walk

        if self._trees[option] is None:
            return None
        tree, parents, ranks, chain = self._trees[option]
        path, at = [], 0
        for _ in range(self._depth):
            rank = dice.choices(range(WIDTH), chances(self._sure))[0]
            children = (r for r in range(1, tree.rows) if parents[r] == at and ranks[r] == rank)
            child = next(children, None)
            if child is None:
                break
            path.append(child)
            at = child
        return Walk(parents, ranks, path, int(tree.sizes[0]), chain)

    @functools.cached_property
    def tokens(self) -> list[float]:
        """Mean tokens of a step under each option."""
        found = []
        for option in range(len(self.options)):
            dice = random.Random(11)
            walks = (self.walk(option, dice) for _ in range(3000))
            found.append(1 + statistics.mean(len(w.path) if w else 0 for w in walks))
        return found


@dataclass
class _Spent:
    """Microseconds, and the tokens of a request in them."""

    us: float = 0.0
    tokens: float = 0.0

    def add(self, us: float, tokens: float) -> None:
        self.us += us
        self.tokens += tokens

    @property
    def us_a_token(self) -> float:
        return self.us / self.tokens


class AutoBench:
    """One engine's steps under the automatic policy and under fixed ones.

    Args:
        worker: the DDTREE worker, its cost table started.
        timer: launches its steps (`slice_bench`).
        on_cuda: false on a CPU, where a step is over when its launch returns.
        clock: nanoseconds.
    """

    def __init__(
        self,
        worker: Any,
        timer: Any,
        on_cuda: bool,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._worker, self._timer, self._on_cuda, self._clock = worker, timer, on_cuda, clock
        self._events: list[Any] = []
        self._learnt: set[int] = set()

    def cell(self, batch: int, context: int, drafts: Drafts, seconds: float) -> dict[str, Any]:
        """Tokens a second of every policy at one point.

        Args:
            batch, context: requests, tokens of each.
            drafts: what is accepted.
            seconds: no round begins after so long; one is always run.

        Returns:
            ``rates`` of all policies; ``of_best`` the automatic one's over the best fixed one's;
            ``used`` and ``used_learning``, steps by option; ``table_us`` by option, what the cost
            table says of a step there, and ``believed``, what the rule made of it in the end.
        """
        tokens, dice = drafts.tokens, random.Random(batch * context)
        self._timer.prepare(batch, context)
        learn = SETTLING_STEPS if batch in self._learnt else LEARNING_STEPS
        self._learnt.add(batch)
        until = self._clock() + LEARNING_S * 1e9
        first = Counter(self._automatic(learn, drafts, dice, until))
        spent = [_Spent() for _ in drafts.options.policies]
        for option in range(len(spent)):
            self._fixed(option, SAMPLE, drafts, spent)
        leaders = sorted(range(len(spent)), key=lambda o: spent[o].us_a_token)[:LEADERS]
        for option in leaders:
            spent[option] = _Spent()
        auto, used = _Spent(), Counter[int]()
        until, rounds = self._clock() + seconds * 1e9, 0
        while rounds < ROUNDS and (not rounds or self._clock() < until):
            chosen: list[int] = []
            us = self._clocked(lambda to=chosen: to.extend(self._automatic(BLOCK, drafts, dice)))
            auto.add(us, sum(tokens[option] for option in chosen))
            used.update(chosen)
            for option in leaders:
                self._fixed(option, FIXED_BLOCK, drafts, spent)
            rounds += 1
        names = [str(policy) for policy in drafts.options.policies]
        chooser = self._worker.chooser
        best = min(leaders, key=lambda o: spent[o].us_a_token)
        every = {**dict(zip(names, spent, strict=True)), "auto": auto}
        return {
            "batch": batch,
            "context": context,
            "tokens_per_step": [round(mean, 3) for mean in tokens],
            "rates": {name: round(batch * 1e6 / s.us_a_token, 2) for name, s in every.items()},
            "best": names[best],
            "of_best": round(spent[best].us_a_token / auto.us_a_token, 4),
            "rounds": rounds,
            "used": {names[o]: n for o, n in sorted(used.items())},
            "used_learning": {names[o]: n for o, n in sorted(first.items())},
            "table_us": list(chooser._auto.table.costs(batch, context)),
            "believed": chooser.report()["believed"],
        }

    def _fixed(self, option: int, steps: int, drafts: Drafts, spent: list[_Spent]) -> None:
        """Steps of one option; their time and yield are added to its own."""
        policy = drafts.options.policies[option]
        self._worker.chooser.interrupted()
        us = self._clocked(lambda: [self._launch(policy) for _ in range(steps)])
        spent[option].add(us, steps * drafts.tokens[option])

    def _clocked(self, act: Callable[[], object]) -> float:
        """Microseconds of ``act``, with an idle device before and after."""
        self._timer.wait()
        begun = self._clock()
        act()
        self._timer.wait()
        self._events.clear()
        return (self._clock() - begun) / 1000

    def _launch(self, policy: Any) -> None:
        """Launches a step when the one before the last is over, as a server does."""
        import torch

        self._timer.launch(policy)
        if self._on_cuda:
            event = torch.cuda.Event()
            event.record()
            self._events.append(event)
            if len(self._events) > 1:
                self._events.pop(0).synchronize()

    def _automatic(
        self, steps: int, drafts: Drafts, dice: random.Random, until: float | None = None
    ) -> Iterator[int]:
        """Steps under the rule; their options. Each step's walk of a request is counted."""
        from overstory.workers.policy.beliefs import GREEDY

        chooser, batch = self._worker.chooser, self._timer._batch
        chooser.interrupted()
        for _ in range(steps):
            if until is not None and self._clock() > until:
                return
            policy, _ = chooser.next(batch)
            self._launch(policy)
            chooser.ended(batch)
            option = drafts.options.policies.index(policy)
            walk = drafts.walk(option, dice)
            if walk is not None:
                chooser._auto.steering.observe(GREEDY, walk)
            yield option


def start(worker: Any, seconds: float, table: Any = None) -> Any:
    """Puts the automatic rule in force, with nothing learnt.

    Args:
        table: costs of this engine's steps that an earlier call has measured.

    Returns:
        The cost table.
    """
    from overstory.workers import tree_policy
    from overstory.workers.policy import FLOOR
    from overstory.workers.policy.start import _measured
    from overstory.workers.tree_policy import AutoPolicy

    table = table or _measured(worker, seconds)
    worker.chooser.start(table, FLOOR)
    tree_policy.HOLDER.automatic = True
    tree_policy.set_current(AutoPolicy())
    return table
