"""Two replicas of one rank of Kimi-K2.6 on two GPUs: KV of long prompts and all weights go over.

    two_gpu_kimi.py hand_off OUT SECONDS

All 61 layers at a rank's shapes (`slice_config.py`), made-up weights, KV of every layer. What the
KV replaces is measured in the same run: the prefill of the same tokens, on both GPUs at once. KV of
`MADE_UP` tokens goes over too, whose prefill would take minutes: there it is memory as it comes.
Needs SGLang on PYTHONPATH and the plugin's entry point; see two_gpu_session.sh. Writes
OUT/kimi_hand_off.json as it goes.
TWO_GPU_TOY=1 rehearses on a CPU.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "engine")]

from slice_config import published, rank_drafter, rank_target, toy, write_pair  # noqa: E402
from slice_engine import SliceEngine, leave_other_models  # noqa: E402
from two_gpu_turn import turn  # noqa: E402

TOY = os.environ.get("TWO_GPU_TOY") == "1"
if TOY:
    SliceEngine.device = "cpu"
ROWS = 33
LENGTHS = (200, 400) if TOY else (8192, 32768)
MADE_UP = 1000 if TOY else 200_000
LAST = int(os.environ.get("TWO_GPU_KIMI_LAST", 600 if TOY else 65536))
"""Computed last: its prefill takes most of the time. 0: not at all."""
BUDGET = int(os.environ.get("TWO_GPU_KIMI_PART", 16 << 30))
"""Bytes of a part: the most that a deployment takes (`orchestrator.handoff.MOST_BYTES`)."""
KIND: Any = "tcp" if TOY else "nccl"
LAYERS = int(os.environ.get("TWO_GPU_KIMI_LAYERS", "61"))


class KimiEngine(SliceEngine):
    """A rank's engine by the folder of its pair."""

    def __init__(self, folder: str, **arguments: Any) -> None:
        if self.device == "cuda":
            import torch

            torch.cuda.set_device(self.gpu_of(0))
        pair = (f"{folder}/target", f"{folder}/drafter")
        super().__init__(pair, ROWS, 0, False, 20.0, **arguments)

    def flush_cache(self) -> None:
        """As in every engine, once what runs ahead of its results has ended."""
        self.step(3)
        super().flush_cache()


def fields(port: int) -> dict[str, Any]:
    if TOY:
        return {"context_length": 4096, "max_total_tokens": 4096, "port": port}
    return {
        "context_length": 202_752,
        "max_total_tokens": MADE_UP + 8192,
        "max_running_requests": 4,
        "cuda_graph_bs_decode": [1],
        "chunked_prefill_size": 8192,
        "mem_fraction_static": 0.85,
        "port": port,
    }


def prompt(length: int) -> list[int]:
    import random

    draw = random.Random(length)
    return [draw.randrange(5, 2000) for _ in range(length)]


def asked(tokens: int) -> dict[str, Any]:
    return {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}


def first_token_s(engine: Any, tokens: list[int]) -> float:
    """Seconds from a request to its first token."""
    begun = time.perf_counter()
    rid = engine.submit(tokens, asked(4))
    for _ in range(2000):
        engine.step()
        if engine.outputs[rid].ids or engine.outputs[rid].refused:
            break
    seconds = time.perf_counter() - begun
    assert engine.outputs[rid].ids, engine.outputs[rid].refused
    engine.run([rid])
    return seconds


# ------------------------------------------------------------------ on the ranks


def serve_weights(scheduler: Any) -> int:
    """The target's memory can be asked for."""
    from handoff_support import _PEERS

    from overstory.workers.handoff.weights import WeightTable

    table = WeightTable(scheduler.model_worker.model_runner.model)
    _PEERS._answers["weights"] = lambda order, size: (  # type: ignore[index]
        table.gather(size),
        lambda: True,
    )
    return table.bytes


def take_weights(scheduler: Any, name: str) -> dict[str, Any]:
    """The target's memory from the other replica; whether it is what it was (both are alike)."""
    import torch
    from handoff_support import _PEERS

    from overstory.workers.handoff.weights import WeightTable

    table = WeightTable(scheduler.model_worker.model_runner.model)
    before = [int(memory.view(-1)[: 1 << 20].long().sum()) for memory in table._memory]
    with torch.inference_mode():
        for memory in table._memory[:50]:
            memory.zero_()
        taker = _PEERS.taker(name)
        done = taker.take({"what": "weights"}, table.scatter(taker.piece_bytes))
    after = [int(memory.view(-1)[: 1 << 20].long().sum()) for memory in table._memory]
    return {"bytes": done.bytes, "seconds": done.seconds, "same": before == after}


def make_up(scheduler: Any, tokens: list[int]) -> int:
    """A text is in the prefix cache, its KV what lies there. Returns its length."""
    from array import array

    import torch

    from overstory.workers.handoff import cached

    with torch.inference_mode():
        held = cached.hold(scheduler, tokens)
        slots = cached.take_slots(scheduler, len(tokens) - len(held.slots))
        assert slots is not None, "no room"
        cached.put_in(scheduler, array("q", tokens), len(held.slots), slots)
        cached.let_go(scheduler, held)
    return len(tokens)


def hand_off(report: Callable[[str, Any], None], out: Path) -> None:
    """Prompts that one replica has computed go to the other."""
    from handoff_support import OtherReplica, close_peer, connect

    target, drafter = toy() if TOY else (published("kimi-k2.6"), published("kimi-k2.6-dflash"))
    ranks = 2 if TOY else 8
    own = rank_target(target, ranks, None if TOY else LAYERS, quantised=not TOY)
    write_pair(out / "kimi", own, rank_drafter(drafter, own, ranks))
    folder, begun, other = str(out / "kimi"), time.perf_counter(), []

    def start_other() -> None:
        other.append(OtherReplica(folder, KimiEngine, 0 if TOY else 1, **fields(32900)))

    starting = threading.Thread(target=start_other)
    starting.start()
    here = KimiEngine(folder, **fields(31900))
    starting.join()
    there = other[0]
    report("start_s", round(time.perf_counter() - begun, 1))
    report("layers", here.worker.model_runner.model_config.num_hidden_layers)
    report("compiled", here.compiled)
    try:
        for engine in (here.generate, lambda *given: there.call("generate", *given)):
            engine([prompt(300)], asked(4))  # whatever is built at the first prefill
        connect(here, there, "k", 60.0)
        for length in LENGTHS:
            with turn():
                report(f"kv of {length}", computed(here, there, prompt(length)))
        with turn():
            report(f"kv of {MADE_UP}, made up", made_up(here, there, prompt(MADE_UP)))
            report("weights_bytes", there.call("at_boundary", serve_weights)[0])
            report("weights", here.at_boundary(take_weights, "k")[0])
        if LAST:
            with turn():
                report(f"kv of {LAST}", computed(here, there, prompt(LAST)))
        here.at_boundary(close_peer, "k")
        there.call("at_boundary", close_peer, "k")
    finally:
        there.close()
        here.close()


def computed(here: Any, there: Any, tokens: list[int]) -> dict[str, Any]:
    """Both compute a prompt at the same time; then its KV goes over."""
    for flush in (here.flush_cache, lambda: there.call("flush_cache")):
        flush()
    there.begin("generate", [tokens], asked(1))
    found: dict[str, Any] = {"prefill_s": first_token_s(here, tokens)}
    there.end()
    return found | moved(here, there, tokens)


def made_up(here: Any, there: Any, tokens: list[int]) -> dict[str, Any]:
    """KV that nobody has computed goes over."""
    there.call("flush_cache")
    there.call("at_boundary", make_up, tokens[:-1])
    return moved(here, there, tokens)


def moved(here: Any, there: Any, tokens: list[int]) -> dict[str, Any]:
    """The KV of a text goes over, three times, with the time to a first token after each: the first
    may compile something."""
    from handoff_support import command

    text = [{"rid": "none", "tokens": tokens}]
    held = there.call("at_boundary", command, "kv_hold", {"key": "k", "texts": text})[0]["lengths"]
    found: dict[str, Any] = {"tokens": len(tokens), "held": held[0], "taken": []}
    order = {"key": "k", "name": "k", "texts": [tokens[: held[0]]], "budget": BUDGET}
    for _ in range(3):
        here.flush_cache()
        came = taken(here, order)
        found["taken"].append(came | {"first_token_s": first_token_s(here, tokens)})
    there.call("at_boundary", command, "kv_let_go", {"key": "k"})
    return found


def taken(here: Any, order: dict[str, Any]) -> dict[str, Any]:
    """All of an order, part after part: `seconds` that they were on their way, `stood_s` that the
    loop stood for them, `wall_s` in all."""
    from handoff_support import take_all

    begun = time.perf_counter()
    parts = [reports[0] for reports in take_all(here, order)]
    wall_s = time.perf_counter() - begun
    total = sum(part["bytes"] for part in parts)
    seconds = sum(part["seconds"] for part in parts)
    return {
        "bytes": total,
        "seconds": seconds,
        "stood_s": sum(part["stood"] for part in parts),
        "wall_s": wall_s,
        "gb_s": total / max(seconds, 1e-9) / 1e9,
        "parts": len(parts),
        "failed": parts[-1]["failed"],
    }


def main() -> None:
    out, begun = Path(sys.argv[2]), time.monotonic()
    seconds = float(sys.argv[3])
    faulthandler.dump_traceback_later(max(5.0, seconds - 6), exit=False)
    results: dict[str, Any] = {}

    def report(what: str, value: Any) -> None:
        results[what] = value
        at = time.monotonic() - begun
        print(f"== [{at:.0f} s] kimi {what}: {json.dumps(value)[-1500:]}", flush=True)
        (out / "kimi_hand_off.json").write_text(json.dumps(results, indent=1))

    try:
        from overstory.workers.environment import prepare_process

        prepare_process(SliceEngine.device)
        leave_other_models()
        hand_off(report, out)
    except BaseException:
        report("failed", traceback.format_exc()[-6000:])
    for child in multiprocessing.active_children():
        child.kill()
    os._exit("failed" in results)


if __name__ == "__main__":
    main()
