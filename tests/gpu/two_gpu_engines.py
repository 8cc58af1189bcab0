"""Real SGLang on two or four GPUs: KV and weights go over by NCCL between two replicas, and one of
TP 2 or 4.

    two_gpu_engines.py ROLE OUT SECONDS
    two_gpu_engines.py compare OUT

Roles, each an own process that may run beside the others:
    hand_off    two replicas of one rank: the second takes the first's weights, then gives it its KV
    hand_off_tp2  the same of two ranks each, one replica's on GPUs 0 and 1, the other's on 1 and 0
    tp2         two ranks with CUDA graphs: texts by policy, digests by NCCL, 10,000 steps
    tp2_custom  the same with SGLang's own all-reduce, texts only
  on four GPUs:
    hand_off_pair  as hand_off_tp2, one replica on GPUs 0 and 1, the other on 2 and 3
    tp4, tp4_custom  as tp2, tp2_custom
`compare` holds the texts of the roles against each other. Needs SGLang on PYTHONPATH and the
plugin's entry point; see two_gpu_session.sh. Writes OUT/engines_ROLE.json after each result.
TWO_GPU_TOY=1 rehearses on a CPU; HANDOFF_TEST_TRANSPORT=tcp runs `hand_off` on one GPU.
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

os.environ["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY"] = "0"  # it would wait in every step
# Other parts take memory on one of the GPUs meanwhile.
os.environ["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "engine")]

from engine_compare import first_difference  # noqa: E402
from engine_cuda import CudaEngine  # noqa: E402
from stand_stacks import compiled_since  # noqa: E402
from tp2_harness import Tp2Harness  # noqa: E402
from two_gpu_turn import turn  # noqa: E402

from overstory.workers.environment import prepare_process  # noqa: E402
from overstory.workers.handoff.pieces import PIECE_BYTES  # noqa: E402

TOY = os.environ.get("TWO_GPU_TOY") == "1"
if TOY:
    CudaEngine.device = "cpu"
ROWS = 32
NEW = 24 if TOY else 96
CONTEXT = 256 if TOY else 2048
POLICIES = ("plain", "chain", "tree-15", "tree-31")
STEPS = 60 if TOY else 10_000
START_S = 150.0
MEET_S = 60.0
"""A replica that imports SGLang for the first time, beside others, comes to the meeting late."""
ONE_GPU = os.environ.get("HANDOFF_TEST_TRANSPORT") == "tcp"
KIND: Any = "tcp" if TOY or ONE_GPU else "nccl"
NEAR = 0.13
"""Log-probabilities closer than this may change places: two steps of bfloat16 logits above 8."""


class CudaTp2(Tp2Harness, CudaEngine):
    """Ranks on GPUs 0 and 1."""

    rank_kind = CudaEngine


class CudaTp4(CudaTp2):
    """Ranks on GPUs 0 to 3."""

    ranks = 4


def fields(drafter: str, **more: Any) -> dict[str, Any]:
    own = {
        "speculative_algorithm": "DDTREE",
        "speculative_draft_model_path": drafter,
        "speculative_num_draft_tokens": ROWS,
        "max_running_requests": 8,
        "random_seed": 1,
    }
    if TOY:
        return own | {"context_length": 512, "max_total_tokens": 4096} | more
    return (
        own
        | {
            "attention_backend": "overstory",
            "sampling_backend": "pytorch",
            "disable_prefill_cuda_graph": True,
            "disable_custom_all_reduce": True,
            # SGLang would build it at the start, which takes minutes; may use NVLink multicast.
            "enforce_disable_flashinfer_allreduce_fusion": True,
            "cuda_graph_bs_decode": [1, 8],
            "max_total_tokens": 131072,
            "mem_fraction_static": 0.9,  # of what is there, where others are beside it
            "skip_server_warmup": True,
            "page_size": 1,
            "log_level": "info",
        }
        | more
    )


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


# ------------------------------------------------------------------ texts


def said(engine: Any, report: Callable[[str, Any], None], texts: list[list[int]]) -> None:
    """Greedy texts by policy, then plain ones with the log-probabilities of the best two."""
    found: dict[str, list[list[int]]] = {}
    for name in POLICIES:
        begun = time.perf_counter()
        with under(name):
            rids = [engine.submit(text, greedy(NEW)) for text in texts]
            while not all(engine.outputs[rid].done for rid in rids):
                engine.step_freely(8)
        engine.step(3)
        engine.flush_cache()
        found[name] = [engine.outputs[rid].ids for rid in rids]
        same = sum(a == b for a, b in zip(found[name], found["plain"], strict=True))
        seconds = round(time.perf_counter() - begun, 2)
        report(name, {"same_as_plain": same, "of": len(texts), "seconds": seconds})
    with under("plain"):
        rids = [
            engine.submit(text, greedy(NEW), return_logprob=True, top_logprobs_num=2)
            for text in texts
        ]
        engine.run(rids)
    engine.flush_cache()
    best = [[sorted(two.values()) for two in engine.outputs[rid].top_logprobs] for rid in rids]
    report("gaps", [[round(two[-1] - two[0], 5) for two in one] for one in best])
    report("gaps_of", [engine.outputs[rid].ids for rid in rids])
    report("texts", found)


def compare(out: Path) -> list[str]:
    """Texts of all roles against those of one rank: equal, or parted where two tokens tie."""
    roles = {
        file.stem.removeprefix("engines_"): json.loads(file.read_text())
        for file in sorted(out.glob("engines_*.json"))
    }
    base = roles.get("hand_off", {}).get("texts")
    lines = []
    for role, found in roles.items():
        for policy, texts in (found.get("texts") or {}).items():
            for against, wanted in (("TP 1 plain", base and base["plain"]), ("own plain", None)):
                if wanted is None:
                    wanted = found["texts"]["plain"]
                    if against != "own plain":
                        continue
                gaps = found if against == "own plain" else roles["hand_off"]
                lines.append(f"== {role} {policy} against {against}: {_apart(texts, wanted, gaps)}")
    return lines


def _apart(texts: list[list[int]], wanted: list[list[int]], gaps: dict[str, Any]) -> str:
    equal, near, far = 0, [], []
    for i, (a, b) in enumerate(zip(texts, wanted, strict=True)):
        at = first_difference(a, b)
        if at is None:
            equal += 1
            continue
        known = first_difference(gaps["gaps_of"][i], b)
        gap = gaps["gaps"][i][at] if known is None or known > at else None
        (near if gap is not None and gap < NEAR else far).append((i, at, gap))
    return f"{equal} of {len(texts)} equal; at a near tie {near}; OTHERS {far}"


# ------------------------------------------------------------------ hand-off


class GivingEngine(CudaEngine):
    """Its weights can be taken by others."""

    def __init__(self, model: str, **arguments: Any) -> None:
        from handoff_support import _PEERS

        from overstory.workers.handoff.loading import SHELF, patches

        for patch in patches():
            patch.install()
        SHELF.settings = "alike"
        _PEERS._answers["weights"] = SHELF.give  # type: ignore[index]
        super().__init__(model, **arguments)
        assert all(patch.taken() for patch in patches())


class TakingEngine(GivingEngine):
    """Takes its weights from another, once that is up, rank from rank.

    Args:
        up: file that is there once the other one serves, with the tickets of its ranks'
            communicators `weights`. Where it never comes, weights come from disk.
    """

    def __init__(self, model: str, up: str, **arguments: Any) -> None:
        from handoff_support import _PEERS

        from overstory.workers.handoff.loading import SHELF

        rank = arguments.get("tp_rank", 0)
        if self.device == "cuda":
            import torch

            torch.cuda.set_device(self.gpu_of(rank))
        import sglang.srt.managers.scheduler  # noqa: F401  # while the other one starts

        deadline = time.monotonic() + START_S
        while not Path(up).exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        try:
            ticket = json.loads(Path(up).read_text())[rank].encode()
            _PEERS.open("weights", KIND, ticket, 30.0, 30.0, PIECE_BYTES[KIND], START_S)
            SHELF.source = _PEERS.taker("weights")
        except Exception as error:
            SHELF.reason = f"did not meet: {error}"
        _STARTED.append(time.perf_counter())
        super().__init__(model, **arguments)
        _STARTED.append(time.perf_counter())
        SHELF.source = None
        _PEERS.close("weights")


class GivingTp2(Tp2Harness, GivingEngine):
    """Ranks on GPUs 0 and 1."""

    rank_kind = GivingEngine


class CrossedEngine(TakingEngine):
    """A rank of `TakingTp2`."""

    def gpu_of(self, tp_rank: int) -> int:
        """Ranks alike of two replicas are on two GPUs: NCCL takes no two on one."""
        return 0 if ONE_GPU else 1 - tp_rank


class TakingTp2(Tp2Harness, CrossedEngine):
    """Ranks on GPUs 1 and 0."""

    rank_kind = CrossedEngine


class FarEngine(TakingEngine):
    """A rank of `FarTp2`."""

    first_gpu = 0 if ONE_GPU else 2


class FarTp2(Tp2Harness, FarEngine):
    """Ranks on GPUs 2 and 3."""

    rank_kind = FarEngine


_STARTED: list[float] = []
"""When this rank's engine began to start and when it was up, by `time.perf_counter`."""


def weights_of(scheduler: Any) -> dict[str, Any]:
    """On a rank: where its weights came from."""
    from overstory.workers.handoff.loading import SHELF

    return {
        "device": str(next(scheduler.model_worker.model_runner.model.parameters()).device),
        "bytes": SHELF.taken.bytes,
        "seconds": SHELF.taken.seconds,
        "disk": SHELF.reason,
        "start_s": _STARTED[1] - _STARTED[0],
    }


def offer_weights(scheduler: Any) -> str:
    """On a rank: the ticket of its communicator."""
    from handoff_support import _PEERS

    del scheduler
    return _PEERS.offer("weights").decode()


def give_weights(scheduler: Any) -> str:
    """On a rank: meets the one that takes; why not, if not."""
    from handoff_support import _PEERS

    del scheduler
    try:
        _PEERS.open("weights", KIND, None, MEET_S, 30.0, PIECE_BYTES[KIND], START_S)
        return ""
    except Exception:
        return traceback.format_exc()[-3000:]


def hand_off(report: Callable[[str, Any], None], out: Path, deadline: float) -> None:
    """One replica's weights go to the other, whose sequences then come back with their KV."""
    del deadline
    _hand_off(report, out, (GivingEngine, TakingEngine), 31900)


def hand_off_tp2(report: Callable[[str, Any], None], out: Path, deadline: float) -> None:
    """The same between two replicas of TP 2, rank to rank, which share the two GPUs."""
    del deadline
    _hand_off(report, out, (GivingTp2, TakingTp2), 34900)


def hand_off_pair(report: Callable[[str, Any], None], out: Path, deadline: float) -> None:
    """The same between two replicas of TP 2 that have two GPUs each."""
    del deadline
    _hand_off(report, out, (GivingTp2, FarTp2), 37900)


def _hand_off(
    report: Callable[[str, Any], None], out: Path, kinds: tuple[Any, Any], port: int
) -> None:
    from handoff_support import OtherReplica

    giving, taking = kinds
    target, drafter = pair()
    up = out / f"replica-{port}.up"
    up.unlink(missing_ok=True)
    begun = time.perf_counter()
    other: list[Any] = []

    def start_other() -> None:
        given = fields(drafter, port=port + 1000, up=str(up))
        other.append(OtherReplica(target, taking, 0 if TOY or ONE_GPU else 1, **given))

    starting = threading.Thread(target=start_other)
    starting.start()
    here = giving(target, **fields(drafter, port=port))
    report("start_s", round(time.perf_counter() - begun, 1))
    _show(up, json.dumps(here.at_boundary(offer_weights)))
    if any(failed := here.at_boundary(give_weights)):
        report("weights_failed", failed)
    starting.join()
    there = other[0]
    try:
        with turn() as waited_s:
            report("waited_s", round(waited_s, 1))
            report("weights", there.call("at_boundary", weights_of))
            said(here, report, prompts(8, 128))
            _move(report, here, there)
    finally:
        there.close()
        here.close()


def _show(file: Path, content: str) -> None:
    """The file is there with all of it, or not there."""
    part = file.with_suffix(".part")
    part.write_text(content)
    part.replace(file)


def _move(report: Callable[[str, Any], None], here: Any, there: Any) -> None:
    """Eight sequences, gone on with here with their KV and without."""
    from handoff_support import close_peer, command, connect, take_all

    from overstory.workers.defrag.audit import audit

    with under("tree-15"):
        texts = prompts(4 if TOY else 8, CONTEXT - 2 * NEW)
        rids = [f"moved-{i}" for i in range(len(texts))]
        for rid, text in zip(rids, texts, strict=True):
            there.call("submit", text, greedy(2 * NEW), rid=rid)
        there.call("step_freely", 8 if TOY else 20)
        for rid in rids:
            there.call("abort", rid)
        there.call("step", 4)
        committed = [there.output(rid).ids for rid in rids]
        under_way = [i for i, ids in enumerate(committed) if 0 < len(ids) < 2 * NEW]
        rids, texts, committed = ([one[i] for i in under_way] for one in (rids, texts, committed))
        sofar = [text + ids for text, ids in zip(texts, committed, strict=True)]
        report("committed", [len(ids) for ids in committed])
        whole = here.generate(texts, greedy(2 * NEW))
        for way in ("without", "without again"):  # The first may compile something.
            here.flush_cache()
            report(way, resumed(here, sofar, committed, whole)[0])
        here.flush_cache()
        computed = resumed(here, sofar, committed, whole)[1]
        asked = {
            "key": "k",
            "texts": [{"rid": r, "tokens": t} for r, t in zip(rids, sofar, strict=True)],
        }
        held = there.call("at_boundary", command, "kv_hold", asked)[0]
        begun = time.perf_counter()
        connect(here, there, "k")
        report("connect_s", time.perf_counter() - begun)
        cut = [text[:n] for text, n in zip(sofar, held["lengths"], strict=True)]
        report("held", held["lengths"])
        for way in ("with", "with again"):  # As without.
            here.flush_cache()
            taken = {"key": "k", "name": "k", "texts": cut, "budget": 1 << 34}
            done = added(take_all(here, taken))
            here.at_boundary(audit)
            begun_at = time.time()
            found, moved = resumed(here, sofar, committed, whole)
            found["compiled"] = compiled_since(begun_at)
            apart = [first_difference(a, b) for a, b in zip(moved, computed, strict=True)]
            found["as_without"] = apart.count(None)
            found["parts_from_without_at"] = apart
            found["taken"] = [one | {"gb_s": _gb_s(one)} for one in done]
            report(way, found)
        there.call("at_boundary", command, "kv_let_go", {"key": "k"})
        here.at_boundary(close_peer, "k")
        there.call("at_boundary", close_peer, "k")
        here.assert_no_leak()
        there.call("assert_no_leak")
        report("no_leak", True)


def added(parts: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What each rank took in all parts."""
    sums = ("bytes", "seconds", "stood")
    return [
        last | {name: sum(part[rank][name] for part in parts) for name in sums}
        for rank, last in enumerate(parts[-1])
    ]


def _gb_s(carried: dict[str, Any]) -> float:
    return float(carried["bytes"] / max(carried["seconds"], 1e-9) / 1e9)


def resumed(
    here: Any,
    sofar: list[list[int]],
    committed: list[list[int]],
    whole: list[list[int]],
) -> tuple[dict[str, Any], list[list[int]]]:
    """Goes on with the sequences: time to the first tokens, cached tokens, how many texts are as if
    nothing had been cut; and the texts."""
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
    }, [here.outputs[rid].ids for rid in rids]


# ------------------------------------------------------------------ TP 2


class _Chain:
    """Digests of a rank, made up."""

    def __init__(self, head: int) -> None:
        self._head = head

    def head(self) -> tuple[int, int]:
        return 1, self._head


def digests(scheduler: Any, times: int, differ: bool) -> dict[str, Any]:
    """On every rank: what comparing digests costs, or what a rank that differs hears."""
    import torch

    from overstory.workers.digest_gather import DigestGather
    from overstory.workers.gate import RanksDiverged

    rank = scheduler.ps.tp_rank
    gather = DigestGather(
        rank,
        _Chain(7 + differ * rank),  # type: ignore[arg-type]
        KIND,
        lambda: torch.device("cuda", torch.cuda.current_device()),
        lambda: "127.0.0.1",
    )
    try:
        gather.compare(scheduler.tp_group)
        begun = time.perf_counter()
        for _ in range(times):
            gather.compare(scheduler.tp_group)
        each = (time.perf_counter() - begun) / max(times, 1)
        return {"rank": rank, "us": round(each * 1e6, 1), "diverged": ""}
    except RanksDiverged as error:
        return {"rank": rank, "us": 0.0, "diverged": str(error)}
    finally:
        gather.close()


def tp2(report: Callable[[str, Any], None], out: Path, deadline: float, **more: Any) -> None:
    """DDTREE on two ranks with graphs: texts by policy, digests, and ranks that stay alike."""
    del out
    _several(report, deadline, CudaTp2, 33900, more)


def tp4(report: Callable[[str, Any], None], out: Path, deadline: float, **more: Any) -> None:
    """The same on four."""
    del out
    _several(report, deadline, CudaTp4, 36900, more)


def _several(
    report: Callable[[str, Any], None],
    deadline: float,
    kind: type[CudaTp2],
    port: int,
    more: dict[str, Any],
) -> None:
    target, drafter = pair()
    begun = time.perf_counter()
    engine = kind(target, **fields(drafter, port=port, **more))
    report("start_s", round(time.perf_counter() - begun, 1))
    try:
        said(engine, report, prompts(8, 128))
        engine.assert_no_leak()
        if not more:
            report("digests", engine.at_boundary(digests, 200, False))
            report("digests_differ", engine.at_boundary(digests, 0, True))
            long_run(engine, report, deadline)
    finally:
        engine.close()


def long_run(engine: Any, report: Callable[[str, Any], None], deadline: float) -> None:
    """Steps, sampled and greedy, of all policies in turn; each round ends with the ranks compared:
    forwards, free slots in order, cached slots, all texts."""
    rounds, forwards, names = 0, 0, ("tree-31", "chain", "tree-15", "plain")
    begun, first = time.monotonic(), engine.scheduler.forward_ct
    while forwards < STEPS and time.monotonic() < deadline - 8:
        with under(names[rounds % len(names)]):
            length = NEW if TOY else 400
            rids = [
                engine.submit(
                    text,
                    greedy(length)
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
        forwards = engine.scheduler.forward_ct - first
        seconds = round(time.monotonic() - begun, 1)
        if rounds % 10 == 0 or forwards >= STEPS:
            report("steps_alike", {"forwards": forwards, "rounds": rounds, "seconds": seconds})


ROLES: dict[str, Callable[..., None]] = {
    "hand_off": hand_off,
    "hand_off_tp2": hand_off_tp2,
    "tp2": tp2,
    "tp2_custom": lambda *given: tp2(*given, disable_custom_all_reduce=False),
    "hand_off_pair": hand_off_pair,
    "tp4": tp4,
    "tp4_custom": lambda *given: tp4(*given, disable_custom_all_reduce=False),
}


def main() -> None:
    role, out, begun = sys.argv[1], Path(sys.argv[2]), time.monotonic()
    if role == "compare":
        print("\n".join(compare(out)))
        return
    prepare_process(CudaEngine.device)  # before anything imports SGLang
    seconds = float(sys.argv[3])
    faulthandler.dump_traceback_later(max(5.0, seconds - 6), exit=False)
    results: dict[str, Any] = {}

    def report(what: str, value: Any) -> None:
        results[what] = value
        at = time.monotonic() - begun
        shown = "..." if what in ("texts", "gaps", "gaps_of") else json.dumps(value)[-1500:]
        print(f"== [{at:.0f} s] {role} {what}: {shown}", flush=True)
        (out / f"engines_{role}.json").write_text(json.dumps(results, indent=1))

    try:
        ROLES[role](report, out, begun + seconds)
    except BaseException:
        report("failed", traceback.format_exc()[-6000:])
    for child in multiprocessing.active_children():
        child.kill()
    os._exit("failed" in results)  # Whatever a failed part has left must not hold the machine.


if __name__ == "__main__":
    main()
