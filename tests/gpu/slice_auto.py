"""The automatic tree policy on a slice's real steps, against each fixed one.

A slice's drafter is of random weights and gets nothing accepted, so acceptance is simulated: the
drafter is sure of its best candidate by a given chance, and right about all its chances. Steps are
the engine's, their times real; what a step yields is the mean of its policy, the same for the
automatic policy and the fixed ones, so that no luck of the draw is in the comparison.
"""

from __future__ import annotations

import functools
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

SURE = {"fits": 0.83, "fits badly": 0.3}
"""Chance of the best candidate: a chain of 7 then yields 4.6 tokens a step, or 1.4."""
FALL = 0.6
"""Each further candidate of a position has so much of the chance of the one before."""
WIDTH = 8
LEARNING_S, LEARNING_STEPS = 4.0, 192
ROUNDS, BLOCK = 4, 16


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

    def cell(self, batch: int, context: int, drafts: Drafts, seconds: float) -> dict[str, Any]:
        """Tokens a second of every policy at one point.

        Args:
            batch, context: requests, tokens of each.
            drafts: what is accepted.
            seconds: bound on the rounds after the automatic policy has learnt; one is always run.
        """
        tokens, dice = drafts.tokens, random.Random(batch * context)
        self._timer.prepare(batch, context)
        until = self._clock() + LEARNING_S * 1e9
        first = Counter(self._automatic(LEARNING_STEPS, drafts, dice, until))
        took: dict[str, list[float]] = {}
        used: Counter[int] = Counter()
        until = self._clock() + seconds * 1e9
        for _ in range(ROUNDS):
            for option, policy in enumerate(drafts.options.policies):
                us = self._clocked(lambda policy=policy: self._fixed(policy))
                took.setdefault(str(policy), []).append(us / (tokens[option] * BLOCK))
            chosen: list[int] = []
            us = self._clocked(lambda to=chosen: to.extend(self._automatic(BLOCK, drafts, dice)))
            used.update(chosen)
            took.setdefault("auto", []).append(us / sum(tokens[option] for option in chosen))
            if self._clock() > until:
                break
        rates = {name: batch * 1e6 / statistics.median(times) for name, times in took.items()}
        best = max((name for name in rates if name != "auto"), key=lambda name: rates[name])
        return {
            "batch": batch,
            "context": context,
            "tokens_per_step": [round(mean, 3) for mean in tokens],
            "rates": {name: round(rate, 2) for name, rate in rates.items()},
            "best": best,
            "of_best": round(rates["auto"] / rates[best], 4),
            "rounds": len(took["auto"]),
            "used": {drafts.options.names[o]: n for o, n in sorted(used.items())},
            "used_learning": {drafts.options.names[o]: n for o, n in sorted(first.items())},
        }

    def _clocked(self, act: Callable[[], None]) -> float:
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

    def _fixed(self, policy: Any) -> None:
        self._worker.chooser.interrupted()
        for _ in range(BLOCK):
            self._launch(policy)

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


def start(worker: Any, seconds: float) -> None:
    """Measures the cost table and puts the automatic rule in force."""
    from overstory.workers import tree_policy
    from overstory.workers.policy import FLOOR
    from overstory.workers.policy.start import _measured
    from overstory.workers.tree_policy import AutoPolicy

    worker.chooser.start(_measured(worker, seconds), FLOOR)
    tree_policy.HOLDER.automatic = True
    tree_policy.set_current(AutoPolicy())
