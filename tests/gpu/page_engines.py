"""One DDTREE engine with pages of PAGE slots on one GPU. See pages_session.sh, which starts three.

    page_engines.py PAGE OUT ALL_PAGES...

Says greedy texts under several policies with SGLang's checks of pages on in every step, finds them
again in its prefix cache, takes requests away in the middle, and audits every page. Then all that
are alive are timed in turn, round by round. Writes OUT/PAGE.json after each result. Has to be done
by PAGES_SESSION_UNTIL, seconds since the epoch. PAGES_DEVICE=cpu is for trying the program out.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine_runs import NEW as MANY
from engine_runs import Report, common, ddtree, prompts, under

TRYING = os.environ.get("PAGES_DEVICE") == "cpu"
NEW = 20 if TRYING else MANY
GREEDY = {"temperature": 0.0, "max_new_tokens": NEW, "ignore_eos": True}
POLICIES = ("plain", "chain", "tree-15", "tree-31")
TIMED = ("plain", "chain", "tree-31")
SIZES = (1, 8)
ROUNDS = 1 if TRYING else 4
ROUND_S = 0.35
"""Least time of a timed batch's repetitions."""
CHECKS = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}
UNTIL = float(os.environ.get("PAGES_SESSION_UNTIL", time.time() + 300))


def build(page_size: int) -> Any:
    from engine_cuda import CudaEngine

    from overstory.workers.tiny.paths import resolve_model

    pair = (resolve_model("overstory-tiny"), resolve_model("overstory-tiny-drafter"))
    fields = common(31000 + 97 * page_size, SIZES) | ddtree(pair[1], rows=32)
    fields |= {"page_size": page_size, "attention_backend": "overstory", "max_total_tokens": 16384}
    if TRYING:
        CudaEngine.device = "cpu"
        for name in ("attention_backend", "mem_fraction_static", "cuda_graph_bs_decode"):
            del fields[name]
    return CudaEngine(pair[0], **fields)


def audited(engine: Any) -> None:
    from overstory.workers.defrag.audit import audit

    engine.at_boundary(audit, False)


def say(engine: Any) -> dict[str, list[list[int]]]:
    """Greedy texts of eight requests at once, two of them again alone."""
    said = {}
    for policy in POLICIES:
        with under(policy):
            engine.flush_cache()
            rids = engine.texts(prompts(8), GREEDY)
            rids += engine.texts(prompts(10)[8:9], GREEDY)
            rids += engine.texts(prompts(10)[9:10], GREEDY)
            engine.assert_no_leak()
        audited(engine)
        said[policy] = [engine.outputs[rid].ids for rid in rids]
    return said


def say_again(engine: Any, said: dict[str, list[list[int]]]) -> dict[str, Any]:
    """Prompts with most of their text: what the prefix cache had of them, and whether they go on as
    the text does."""
    cut, found = NEW * 2 // 5, {}
    asked = [prompt + text[:cut] for prompt, text in zip(prompts(8), said["tree-31"], strict=False)]
    for policy in ("plain", "tree-31"):
        with under(policy):
            engine.flush_cache()
            engine.texts(prompts(8), GREEDY)
            rids = engine.texts(asked, GREEDY | {"max_new_tokens": NEW - cut})
            engine.assert_no_leak()
        audited(engine)
        texts = [engine.outputs[rid].ids for rid in rids]
        found[policy] = {
            "cached": [engine.outputs[rid].cached_tokens for rid in rids],
            "asked": [len(one) for one in asked],
            "goes_on": [
                text == whole[cut:] for text, whole in zip(texts, said[policy], strict=False)
            ],
        }
    return found


def take_away(engine: Any) -> str:
    """Aborts in the middle of trees."""
    with under("tree-31"):
        rids = [engine.submit(one, GREEDY | {"max_new_tokens": 500}) for one in prompts(12)]
        for rid in rids:
            engine.step(3)
            engine.abort(rid)
        engine.run(rids)
    engine.assert_no_leak()
    audited(engine)
    return "every page is free or cached"


def time_round(engine: Any) -> list[dict[str, Any]]:
    from engine_cuda import timed, together

    rows = []
    for requests in SIZES:
        for policy in TIMED:
            params = GREEDY | {"max_new_tokens": NEW if policy == "plain" or TRYING else 256}
            rates, begun = [], time.perf_counter()
            with under(policy):
                while not rates or time.perf_counter() - begun < ROUND_S:
                    rates.append(timed(engine, prompts(requests), params))
            rows.append({"conc": requests, "policy": policy} | together(rates).as_dict())
    return rows


class Turns:
    """Engines in other processes that run their rounds one after the other."""

    def __init__(self, page: str, every: Sequence[str], out: Path) -> None:
        self._page, self._every, self._out = page, list(every), out

    def run(self, act: Any) -> list[Any]:
        """`act()` of each round in turn; the first round, for warming up, is left out."""
        results = []
        place = self._every.index(self._page)
        for number in range(1 + ROUNDS):
            self._file(self._page).write_text(str(number))
            while not all(
                self._through(other) > number - (at > place)
                for at, other in enumerate(self._every)
                if at != place
            ):
                if time.time() > UNTIL:
                    return results
                time.sleep(0.002)
            with (self._out / "alone.lock").open("a") as held:
                fcntl.flock(held, fcntl.LOCK_EX)
                rows = act()
            results += [{"round": number, **row} for row in rows if number]
        self._file(self._page).write_text("1000")
        return results

    def _file(self, page: str) -> Path:
        return self._out / f"{page}.turn"

    def _through(self, page: str) -> int:
        """Rounds that another one has done; it stands before its round of that number."""
        if (self._out / f"{page}.done").exists():
            return 1000
        try:
            return int(self._file(page).read_text() or -1)
        except FileNotFoundError:
            return -1


def main() -> None:
    page, out, every = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    report, begun = Report(page, out), time.monotonic()
    os.environ.update(CHECKS)
    try:
        engine = build(int(page))
    except BaseException:
        import traceback

        report.content["errors"]["build"] = traceback.format_exc()[-4000:]
        report.put("failed", ["build"])
        os._exit(1)
    allocator = engine.scheduler.token_to_kv_pool_allocator
    report.put("allocator", [type(allocator).__name__, int(allocator.page_size)])
    report.put("start_seconds", time.monotonic() - begun)
    report.attempt("greedy", lambda: say(engine))
    said = report.content.get("greedy", {})
    report.attempt("again", lambda: say_again(engine, said))
    report.attempt("taken_away", lambda: take_away(engine))
    os.environ["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY"] = "0"  # it waits in every step
    report.attempt("times", lambda: Turns(page, every, out).run(lambda: time_round(engine)))
    report.put("seconds", time.monotonic() - begun)
    os._exit(0)


if __name__ == "__main__":
    main()
