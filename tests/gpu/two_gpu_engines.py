"""Real SGLang on two GPUs: KV handed over by NCCL between two replicas, and one of TP 2.

    two_gpu_engines.py OUT SECONDS

Needs SGLang on PYTHONPATH and the plugin's entry point; see two_gpu_session.sh. Writes
OUT/engines.json after each part.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY"] = "0"  # it would wait in every step
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "engine")]

from engine_cuda import CudaEngine  # noqa: E402
from tp2_harness import Tp2Harness  # noqa: E402

ROWS = 32
NEW = 96
CONTEXT = 2048


class CudaTp2(Tp2Harness, CudaEngine):
    """Ranks on GPUs 0 and 1."""

    rank_kind = CudaEngine


def fields(drafter: str, **more: Any) -> dict[str, Any]:
    return {
        "speculative_algorithm": "DDTREE",
        "speculative_draft_model_path": drafter,
        "speculative_num_draft_tokens": ROWS,
        "attention_backend": "overstory",
        "sampling_backend": "pytorch",
        "disable_prefill_cuda_graph": True,
        "disable_custom_all_reduce": True,
        "cuda_graph_bs_decode": [1, 8],
        "max_running_requests": 8,
        "max_total_tokens": 131072,
        "mem_fraction_static": 0.25,
        "random_seed": 1,
        "skip_server_warmup": True,
        "page_size": 1,
        "log_level": "info",
    } | more


def pair() -> tuple[str, str]:
    from overstory.workers.tiny.paths import resolve_model

    return resolve_model("overstory-tiny"), resolve_model("overstory-tiny-drafter")


def prompts(count: int, length: int) -> list[list[int]]:
    """Held-out code, strung together to the length."""
    from overstory.workers.tiny.prompts import heldout_prompts

    every = [list(prompt.ids) for prompt in heldout_prompts()]
    made = []
    for number in range(count):
        text: list[int] = []
        while len(text) < length:
            text += every[(number + len(text)) % len(every)]
        made.append(text[:length])
    return made


def under(name: str) -> Any:
    from ddtree_support import policy

    return policy(name)


def greedy(tokens: int) -> dict[str, Any]:
    return {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}


# ------------------------------------------------------------------ hand-off


def hand_off(report: Callable[[str, Any], None]) -> None:
    """Sixteen sequences move from GPU 1 to GPU 0, with their KV and without."""
    from handoff_support import OtherReplica, close_peer, command, connect

    from overstory.workers.defrag.audit import audit

    target, drafter = pair()
    other: list[Any] = []

    def start_other() -> None:
        other.append(OtherReplica(target, CudaEngine, 1, **fields(drafter, port=32900)))

    starting = threading.Thread(target=start_other)
    starting.start()
    here = CudaEngine(target, **fields(drafter, port=31900))
    starting.join()
    there = other[0]
    try:
        with under("tree-15"):
            texts = prompts(8, CONTEXT - 2 * NEW)
            rids = [f"moved-{i}" for i in range(len(texts))]
            for rid, text in zip(rids, texts, strict=True):
                there.call("submit", text, greedy(2 * NEW), rid=rid)
            there.call("step_freely", 24)
            for rid in rids:
                there.call("abort", rid)
            there.call("step", 4)
            committed = [there.output(rid).ids for rid in rids]
            sofar = [text + ids for text, ids in zip(texts, committed, strict=True)]
            report("committed", [len(ids) for ids in committed])
            whole = here.generate(texts, greedy(2 * NEW))
            here.flush_cache()
            report("without", resumed(here, sofar, texts, committed, whole))
            here.flush_cache()
            asked = {
                "key": "k",
                "texts": [{"rid": r, "tokens": t} for r, t in zip(rids, sofar, strict=True)],
            }
            held = there.call("at_boundary", command, "kv_hold", asked)[0]
            begun = time.perf_counter()
            connect(here, there, "k")
            report("connect_s", time.perf_counter() - begun)
            cut = [text[:n] for text, n in zip(sofar, held["lengths"], strict=True)]
            taken = {"key": "k", "name": "k", "texts": cut, "budget": 1 << 34}
            done = here.at_boundary(command, "kv_take", taken)[0]
            here.at_boundary(audit)
            report("taken", done | {"gb_s": done["bytes"] / max(done["seconds"], 1e-9) / 1e9})
            there.call("at_boundary", command, "kv_let_go", {"key": "k"})
            here.at_boundary(close_peer, "k")
            there.call("at_boundary", close_peer, "k")
            report("with", resumed(here, sofar, texts, committed, whole))
            here.assert_no_leak()
    finally:
        there.close()
        here.close()


def resumed(
    here: Any,
    sofar: list[list[int]],
    texts: list[list[int]],
    committed: list[list[int]],
    whole: list[list[int]],
) -> dict[str, Any]:
    """Goes on with the sequences: time to the first tokens, cached tokens, texts that differ."""
    begun = time.perf_counter()
    rids = [
        here.submit(tokens, greedy(2 * NEW - len(ids)))
        for tokens, ids in zip(sofar, committed, strict=True)
    ]
    while not all(here.outputs[rid].ids for rid in rids):
        here.step()
    first_s = time.perf_counter() - begun
    here.run(rids)
    same = [
        ids + here.outputs[rid].ids == text
        for ids, rid, text in zip(committed, rids, whole, strict=True)
    ]
    return {
        "first_tokens_s": first_s,
        "cached": [here.outputs[rid].cached_tokens for rid in rids],
        "tokens": [len(tokens) for tokens in sofar],
        "same_text": sum(same),
        "of": len(same),
    }


# ------------------------------------------------------------------ TP 2


def tp2(report: Callable[[str, Any], None], deadline: float) -> None:
    """DDTREE on two ranks with graphs: texts as plain decoding's, and ranks that stay alike."""
    target, drafter = pair()
    engine = CudaTp2(target, **fields(drafter, port=33900))
    try:
        texts = prompts(8, 128)
        said: dict[str, list[list[int]]] = {}
        for name in ("plain", "chain", "tree-15", "tree-31"):
            with under(name):
                begun = time.perf_counter()
                rids = [engine.submit(text, greedy(NEW)) for text in texts]
                while not all(engine.outputs[rid].done for rid in rids):
                    engine.step_freely(8)
                said[name] = [engine.outputs[rid].ids for rid in rids]
                same = sum(a == b for a, b in zip(said[name], said["plain"], strict=True))
                seconds = time.perf_counter() - begun
                report(name, {"same_as_plain": same, "of": len(texts), "seconds": seconds})
            engine.step(3)
            engine.flush_cache()
        engine.assert_no_leak()
        report("steps_alike", long_run(engine, deadline))
    finally:
        engine.close()


def long_run(engine: Any, deadline: float) -> dict[str, Any]:
    """Steps as long as there is time, sampled and greedy, of all policies in turn; each round ends
    with the ranks compared."""
    rounds, names = 0, ("tree-31", "chain", "tree-15", "plain")
    begun, first = time.monotonic(), engine.scheduler.forward_ct
    while time.monotonic() < deadline - 8:
        with under(names[rounds % len(names)]):
            rids = [
                engine.submit(
                    text,
                    greedy(400)
                    | ({"temperature": 1.0, "sampling_seed": rounds * 8 + i} if i % 2 else {}),
                )
                for i, text in enumerate(prompts(8, 64 + rounds % 32))
            ]
            while not all(engine.outputs[rid].done for rid in rids):
                engine.step_freely(100)
        engine.step(3)
        engine.assert_no_leak()
        engine.flush_cache()
        rounds += 1
    steps = engine.scheduler.forward_ct - first
    return {"forwards": steps, "rounds": rounds, "seconds": time.monotonic() - begun}


def main() -> None:
    out, begun = Path(sys.argv[1]), time.monotonic()
    deadline = begun + float(sys.argv[2])
    results: dict[str, Any] = {}

    def part(name: str, act: Callable[[Callable[[str, Any], None]], None]) -> None:
        results[name] = {}

        def report(what: str, value: Any) -> None:
            results[name][what] = value
            print(
                f"== [{time.monotonic() - begun:.0f} s] {name} {what}: {json.dumps(value)[-1500:]}",
                flush=True,
            )
            (out / "engines.json").write_text(json.dumps(results, indent=1))

        try:
            act(report)
        except BaseException:
            report("failed", traceback.format_exc()[-6000:])

    part("hand_off", hand_off)
    part("tp2", lambda report: tp2(report, deadline))
    os._exit(0)  # Whatever a failed part has left must not hold the machine.


if __name__ == "__main__":
    main()
