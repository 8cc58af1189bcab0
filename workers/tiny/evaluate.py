"""Acceptance of the pair on held-out prompts, by real verification in float32.

    python -m overstory.workers.tiny.evaluate --pair FOLDER --out docs/benchmarks/tiny_pair.json

Every proposal decodes every prompt through `PairDecoder.speculate`, and its tokens are compared
with those of plain decoding.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .checkpoint import load_drafter, load_target
from .config import DrafterConfig
from .decoding import Chooser, Decoded, PairDecoder, choose_greedily, sampler, tree_proposer
from .paths import PAIR_FOLDER
from .prompts import PROMPT_TOKENS, heldout_prompts

NEW_TOKENS = 192
TEMPERATURES = (0.0, 0.7, 1.0)
NODES = (8, 15, 31, 63)


@dataclass(frozen=True)
class Proposal:
    """A way of drafting, by name."""

    name: str
    nodes: int
    spine_first: bool


def proposals(depth: int) -> Iterator[Proposal]:
    """The chain and all trees."""
    yield Proposal("chain", depth, True)
    for nodes in NODES:
        yield Proposal(f"tree-{nodes}", nodes, False)
        yield Proposal(f"spine-{nodes}", nodes, True)


def loops(tokens: Tensor, gram: int = 8) -> list[bool]:
    """Whether more than half of a text's 8-grams stood in it before; `tokens` [batch, new]."""
    out = []
    for text in tokens.tolist():
        grams = [tuple(text[i : i + gram]) for i in range(len(text) - gram + 1)]
        out.append(len(set(grams)) < 0.5 * len(grams))
    return out


def summary(decoded: Decoded, plain: Decoded, looping: list[bool]) -> dict[str, object]:
    """Numbers of one proposal.

    `tokens_per_forward` counts what every target forward gave, the last one of a prompt whole.
    """
    rounds = [gain for prompt in decoded.accepted for gain in prompt]
    straight = [
        gain
        for prompt, loop in zip(decoded.accepted, looping, strict=True)
        if not loop
        for gain in prompt
    ]
    means = torch.tensor([sum(prompt) / len(prompt) for prompt in decoded.accepted])
    count = torch.tensor([len(prompt) for prompt in decoded.accepted], dtype=torch.float32)
    mean = sum(rounds) / len(rounds)
    spread = ((means - mean) * count / count.mean()).std() / len(means) ** 0.5
    reached = torch.tensor(rounds)
    return {
        "tokens_per_forward": round(mean, 3),
        "standard_error": round(spread.item(), 3),
        "tokens_per_forward_without_loops": round(sum(straight) / max(1, len(straight)), 3),
        "emitted_per_forward": round(len(means) * (decoded.tokens.shape[1] - 1) / len(rounds), 3),
        "rounds": len(rounds),
        "rounds_off_the_spine": round(sum(decoded.branched) / len(rounds), 3),
        "reached_depth": [
            round((reached > depth).float().mean().item(), 3)
            for depth in range(1, int(reached.max()))
        ],
        "texts_equal_to_plain": int((decoded.tokens == plain.tokens).all(1).sum()),
    }


@dataclass(frozen=True)
class Task:
    """Work of one process: one temperature and a few proposals."""

    pair: Path
    device: str
    prompts: int
    new: int
    temperature: float
    proposals: tuple[Proposal, ...]


def run(task: Task) -> list[dict[str, object]]:
    """One row per proposal of the task."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    decoder = PairDecoder(
        load_target(task.pair / "target", task.device),
        load_drafter(task.pair / "drafter", task.device),
    )
    chosen = [prompt.ids for prompt in heldout_prompts()[: task.prompts]]
    prompts = torch.tensor(chosen, device=task.device)
    seeds = torch.arange(len(prompts), device=task.device) + 1000
    choose: Chooser = choose_greedily
    if task.temperature:
        choose = sampler(seeds, task.temperature)
    plain = decoder.plain(prompts, task.new, choose)
    looping = loops(plain.tokens)
    rows: list[dict[str, object]] = []
    for proposal in task.proposals:
        propose = tree_proposer(proposal.nodes, proposal.spine_first)
        decoded = decoder.speculate(prompts, task.new, choose, propose)
        rows.append(
            {
                "temperature": task.temperature,
                "proposal": proposal.name,
                "nodes": proposal.nodes,
                **summary(decoded, plain, looping),
                "looping_texts": sum(looping),
            }
        )
        shown = list(rows[-1].items())
        print(*(f"{name} {value}" for name, value in shown if name != "reached_depth"), flush=True)
    return rows


def tasks(pair: Path, device: str, prompts: int, new: int, depth: int) -> list[Task]:
    """All proposals at all temperatures, in portions of about equal work."""
    every = list(proposals(depth))
    portions = [tuple(every[:5]), tuple(every[5:7]), tuple(every[7:])]
    return [
        Task(pair, device, prompts, new, temperature, portion)
        for portion in reversed(portions)
        for temperature in TEMPERATURES
    ]


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="measure acceptance of the built-in pair")
    parser.add_argument("--pair", type=Path, default=PAIR_FOLDER)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--new", type=int, default=NEW_TOKENS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--processes", type=int, default=9)
    arguments = parser.parse_args()

    depth = DrafterConfig().block_size - 1
    work = tasks(arguments.pair, arguments.device, arguments.prompts, arguments.new, depth)
    start = time.monotonic()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, spawn) as pool:
        rows = [row for some in pool.map(run, work) for row in some]
    rows.sort(key=lambda row: (row["temperature"], row["nodes"]))
    on_gpu = arguments.device == "cuda"
    report = {
        "command": " ".join(["python -m overstory.workers.tiny.evaluate", *sys.argv[1:]]),
        "hardware": torch.cuda.get_device_name() if on_gpu else platform.processor(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "dtype": "float32",
        "prompts": min(arguments.prompts, len(heldout_prompts())),
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": arguments.new,
        "seconds": round(time.monotonic() - start, 1),
        "rows": rows,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
