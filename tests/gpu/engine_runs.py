"""One engine on one GPU: what it says, then how fast. See engine_session.sh, which starts them.

    engine_runs.py ROLE OUT [EARLIER_ROLE...]

Writes OUT/ROLE.json. All roles say their texts side by side; then each is timed alone, after those
that are named (OUT/EARLIER_ROLE.done says that one is through).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NEW = 96
TIMED_NEW = 320
REPEATS = 3
POLICIES = ("plain", "chain", "tree-15", "tree-31")
LONG_CONTEXT = 32768
GREEDY = {"temperature": 0.0, "max_new_tokens": NEW, "ignore_eos": True}
ROWS = 32


class Report:
    """Results of one role, on disk after each of them."""

    def __init__(self, role: str, out: Path) -> None:
        self._file = out / f"{role}.json"
        self.content: dict[str, Any] = {"role": role, "errors": {}}

    def put(self, name: str, value: Any) -> None:
        self.content[name] = value
        self._file.write_text(json.dumps(self.content))
        print(f"[{time.strftime('%H:%M:%S')}] {name} done", flush=True)

    def attempt(self, name: str, act: Callable[[], Any]) -> None:
        """Puts the result of ``act``; an error is noted, printed, and does not end the run."""
        try:
            self.put(name, act())
        except BaseException:
            text = traceback.format_exc()
            print(text, flush=True)
            self.content["errors"][name] = text[-3000:]
            self.put("failed", sorted(self.content["errors"]))


@contextlib.contextmanager
def turn(lock: Path, alone: bool) -> Iterator[None]:
    """With the others that say texts, or alone on the machine."""
    with lock.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


def wait_for(out: Path, earlier: list[str]) -> None:
    """Until the roles that go first are through or have ended."""
    while not all((out / f"{role}.done").exists() for role in earlier):
        time.sleep(0.1)


def prompts(count: int) -> list[list[int]]:
    """Held-out code, of different lengths."""
    from overstory.workers.tiny.prompts import heldout_prompts

    every = [list(prompt.ids) for prompt in heldout_prompts()]
    return [every[i % len(every)][: 160 - 13 * (i % 8)] for i in range(count)]


def common(port: int) -> dict[str, Any]:
    return {
        "sampling_backend": "pytorch",
        "disable_prefill_cuda_graph": True,
        "cuda_graph_bs_decode": [1, 8],
        "max_running_requests": 8,
        "max_total_tokens": 65536,
        "mem_fraction_static": 0.25,
        "random_seed": 1,
        "skip_server_warmup": True,
        "page_size": 1,
        "log_level": "info",
        "port": port,
    }


def ddtree(drafter: str, rows: int = ROWS, **more: Any) -> dict[str, Any]:
    return {
        "speculative_algorithm": "DDTREE",
        "speculative_draft_model_path": drafter,
        "speculative_num_draft_tokens": rows,
    } | more


def long_pair(out: Path, pair: tuple[str, str]) -> tuple[str, str]:
    """Configs of the built-in pair for a longer context; weights are random."""
    folders = []
    for path, name in zip(pair, ("target", "drafter"), strict=True):
        folder = out / f"long-{os.getpid()}" / name
        folder.mkdir(parents=True, exist_ok=True)
        config = json.loads((Path(path) / "config.json").read_text())
        config["max_position_embeddings"] = 2 * LONG_CONTEXT
        if config.get("rope_scaling"):
            config["rope_scaling"]["original_max_position_embeddings"] = 2 * LONG_CONTEXT
        (folder / "config.json").write_text(json.dumps(config))
        folders.append(str(folder))
    return folders[0], folders[1]


def native_layers() -> None:
    """SGLang's norms, activations, rotary embeddings and experts in torch: its kernels of them
    take no float32."""
    from overstory.workers.environment import prepare_process

    prepare_process("cuda")  # before SGLang is there
    from sglang.srt.layers.utils.multi_platform import MultiPlatformOp

    given = MultiPlatformOp.dispatch_forward

    def dispatch(layer: Any) -> Any:
        name = type(layer).__name__
        native = name in ("RMSNorm", "SiluAndMul", "UnquantizedFusedMoEMethod")
        return layer.forward_native if native or "Rotary" in name else given(layer)

    MultiPlatformOp.dispatch_forward = dispatch


def name_of(role: str) -> str:
    """The kind of engine: a role less what it is run with."""
    return role.partition("_")[2] if role.startswith(("long", "fp32")) else role


def build(role: str, out: Path) -> Any:
    """The engine of a role."""
    if "parts" in role:
        os.environ["OVERSTORY_WHOLE_STEP_GRAPHS"] = "0"
    if role.startswith("fp32"):
        native_layers()
    from engine_cuda import CudaEngine, StockEngine

    from overstory.workers.tiny.paths import resolve_model

    pair = (resolve_model("overstory-tiny"), resolve_model("overstory-tiny-drafter"))
    port = 31000 + 97 * (sum(map(ord, role)) % 200)
    fields = common(port)
    graphs_off = {"disable_cuda_graph": True}
    if role.startswith("long"):
        pair = long_pair(out, pair)
        fields |= {
            "load_format": "dummy",
            "context_length": LONG_CONTEXT + 4096,
            "max_total_tokens": 2 * LONG_CONTEXT,
            "chunked_prefill_size": 8192,
            "cuda_graph_bs_decode": [1],
            "max_running_requests": 2,
        }
    if role.startswith("fp32"):
        fields |= {"dtype": "float32"}
    name = name_of(role)
    if name in ("ours", "parts"):
        return CudaEngine(pair[0], **fields, **ddtree(pair[1], attention_backend="overstory"))
    if name == "eager":
        own = ddtree(pair[1], attention_backend="overstory", **graphs_off)
        return CudaEngine(pair[0], **fields, **own)
    if name == "triton":
        own = ddtree(pair[1], attention_backend="triton", **graphs_off)
        return CudaEngine(pair[0], **fields, **own)
    if name == "stock":
        own = graphs_off if role.startswith("fp32") else {}  # experts in torch read on the host
        return StockEngine(pair[0], **fields, **own, attention_backend="triton")
    if name == "dflash":
        return StockEngine(
            pair[0],
            **fields,
            attention_backend="triton",
            speculative_algorithm="DFLASH",
            speculative_draft_model_path=pair[1],
        )
    raise SystemExit(f"unknown role {role}")


@contextlib.contextmanager
def under(policy: str | None) -> Iterator[None]:
    if policy is not None:
        from overstory.workers import tree_policy
        from overstory.workers.tree_policy import TreePolicy

        tree_policy.set_current(TreePolicy.parse(policy))
    yield


def policies_of(engine: Any) -> tuple[str | None, ...]:
    return POLICIES if engine.scheduler.server_args.speculative_algorithm == "DDTREE" else (None,)


def say_greedy(engine: Any) -> dict[str, list[list[int]]]:
    said = {}
    for policy in policies_of(engine):
        with under(policy):
            engine.flush_cache()
            rids = engine.texts(prompts(8), GREEDY)
            rids += engine.texts(prompts(10)[8:9], GREEDY)
            rids += engine.texts(prompts(10)[9:10], GREEDY)
            engine.assert_no_leak()
        said[str(policy)] = [engine.outputs[rid].ids for rid in rids]
    return said


def say_gaps(engine: Any) -> list[list[float]]:
    """Log-probability of the best token over that of the second, at each place of the texts."""
    with under(policies_of(engine)[0]):
        rids = engine.texts(prompts(8), GREEDY, return_logprob=True, top_logprobs_num=2)
    every = [engine.outputs[rid].top_logprobs for rid in rids]
    return [
        [max(best.values()) - min(best.values()) for best in of_request] for of_request in every
    ]


def sampled_params() -> list[dict[str, Any]]:
    """Of the 8 requests of `say_sampled`: one in four is greedy."""
    kinds = [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 40},
        {"temperature": 0.0},
    ]
    return [
        kinds[i % 4] | {"max_new_tokens": NEW, "ignore_eos": True, "sampling_seed": 7 + i}
        for i in range(8)
    ]


def say_sampled(engine: Any) -> dict[str, list[list[int]]]:
    params = sampled_params()
    said = {}
    for policy in policies_of(engine):
        with under(policy):
            rids = engine.texts(prompts(8), params)
        said[str(policy)] = [engine.outputs[rid].ids for rid in rids]
    return said


def say_partings(engine: Any, said: dict[str, list[list[int]]]) -> list[dict[str, Any]]:
    """Where sampled texts part from plain's: how close the draw was.

    A draw inverts the cumulative distribution, in token-id order, at one number u that depends on
    seed and position alone. Two distributions give different tokens there if a bound between them
    has moved across u. For each parting: u, how far the bound is from u in the distribution of the
    prompt's forward (`shift`: 0 would be on it), and how far apart the cumulative distributions of
    several forwards of the same context are at most (`spread`: prompt, plain, policy).
    """
    found = []
    for policy in POLICIES[1:]:
        for i, (text, plain) in enumerate(zip(said[policy], said["plain"], strict=True)):
            at = next((k for k, (a, b) in enumerate(zip(text, plain, strict=True)) if a != b), None)
            if at is not None and at > 0:
                found.append(_parting(engine, policy, i, at, text, plain))
    return found


def _parting(
    engine: Any, policy: str, i: int, at: int, text: list[int], plain: list[int]
) -> dict[str, Any]:
    import torch

    from overstory.kernels.reference.sample import uniforms

    params, context = sampled_params()[i], prompts(8)[i] + text[:at]
    u = float(uniforms(torch.tensor([params["sampling_seed"]]), torch.tensor([len(context) - 1])))
    bounds = [_cumulative(engine, "plain", context, 0, params)]
    for name in ("plain", policy):
        seen = _cumulative(engine, name, context[:-1], 1, params, context[-1])
        bounds += [seen] if seen is not None else []
    first = bounds[0]
    assert first is not None
    spread = max((float((first - other).abs().max()) for other in bounds[1:]), default=None)
    shifts = []
    for token in (text[at], plain[at]):
        low, high = (float(first[token - 1]) if token else 0.0), float(first[token])
        shifts.append(max(low - u, u - high, 0.0))
    return {
        "policy": policy,
        "text": i,
        "token": at,
        "u": u,
        "shift": max(shifts),
        "spread": spread,
        "greedy": params["temperature"] == 0.0,
    }


def _cumulative(
    engine: Any,
    policy: str,
    context: list[int],
    after: int,
    params: dict[str, Any],
    expected: int | None = None,
) -> Any:
    """[V] float64 cumulative distribution that token number ``after`` is drawn from; None if the
    token before it was not ``expected``."""
    import torch

    from overstory.kernels.reference.sample import filtered_probs

    asked = params | {"max_new_tokens": after + 1}
    with under(policy):
        engine.flush_cache()
        rids = engine.texts([context], asked, return_logprob=True, top_logprobs_num=4096)
    output = engine.outputs[rids[0]]
    if expected is not None and output.ids[0] != expected:
        return None
    logits = torch.full((1, 4096), float("-inf"))
    for token, value in output.top_logprobs[after].items():
        logits[0, int(token)] = value
    one = torch.ones(1)
    top_k, top_p = params.get("top_k", -1), params.get("top_p", 1.0)
    probs = filtered_probs(logits, one, one.to(torch.int32) * top_k, one * top_p, torch.zeros(1))
    return probs[0].cumsum(0)


def say_node_logits(engine: Any) -> list[dict[str, float]]:
    """Nodes of a few trees: their logits in the tree against their paths run alone.

    Returns:
        of each node its depth, the largest difference of log-probabilities among tokens of at least
        e^-10 in either, and the gap of the best two tokens where the best differ (else 0).
    """
    import torch

    prompt, seen = prompts(1)[0], []
    worker = engine.scheduler.model_worker
    accept = worker._accept

    def watched(batch: Any, tree: Any, logits_output: Any, rows_at: Any) -> Any:
        logits = torch.log_softmax(logits_output.next_token_logits.float(), dim=-1).cpu()
        fields = (batch.seq_lens, tree.tokens[0], tree.parents[0], tree.sizes)
        seen.append((*(field.tolist() for field in fields), logits))
        return accept(batch, tree, logits_output, rows_at)

    worker._accept = watched
    try:
        with under("tree-15"):
            rids = engine.texts([prompt], GREEDY | {"max_new_tokens": 48}, return_logprob=True)
    finally:
        del worker._accept
    text = prompt + engine.outputs[rids[0]].ids
    found = []
    for lengths, tokens, parents, sizes, logits in seen[:: max(1, len(seen) // 4)][:4]:
        for row in range(sizes[0])[-5:]:
            path, at = [], row
            while at >= 0:
                path.insert(0, tokens[at])
                at = parents[at]
            alone = _logprobs_after(engine, text[: lengths[0]] + path)
            near = torch.maximum(alone, logits[row]) > -10
            best = alone.topk(2).values
            same = int(alone.argmax()) == int(logits[row].argmax())
            found.append(
                {
                    "depth": len(path) - 1,
                    "difference": float((alone - logits[row])[near].abs().max()),
                    "gap": 0.0 if same else float(best[0] - best[1]),
                }
            )
    return found


def _logprobs_after(engine: Any, context: list[int]) -> Any:
    """[V] float32 after a text, by a prefill of it alone."""
    import torch

    with under("plain"):
        engine.flush_cache()
        asked = GREEDY | {"max_new_tokens": 1}
        rids = engine.texts([context], asked, return_logprob=True, top_logprobs_num=4096)
    values = torch.full((4096,), float("-inf"))
    for token, value in engine.outputs[rids[0]].top_logprobs[0].items():
        values[int(token)] = value
    return values


def say_ruled(engine: Any) -> dict[str, Any]:
    kinds = [
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.3, "presence_penalty": 0.2},
        {"min_new_tokens": 8},
        {"logit_bias": {"225": -100.0, "203": -100.0}},
    ]
    params = [kinds[i % 4] | GREEDY | {"max_new_tokens": 48} for i in range(8)]
    said = {}
    for policy in policies_of(engine):
        with under(policy):
            rids = engine.texts(prompts(8), params, return_logprob=True, top_logprobs_num=1)
        said[str(policy)] = [engine.outputs[rid].ids for rid in rids]
    return said


def say_steps(engine: Any) -> dict[str, Any]:
    """What the counters of our steps hold, and that no kernel met bad values."""
    import torch

    from overstory.kernels import ops
    from overstory.workers.step_stats import STATS

    ops.raise_bad_input(torch.device("cuda", torch.cuda.current_device()))
    tiers = engine.scheduler.model_worker._tiers
    return {"steps": STATS.snapshot()["verify"], "tiers": list(tiers.rows) if tiers else None}


def time_short(engine: Any, role: str, repeats: int) -> list[dict[str, Any]]:
    """Every policy at 1 and 8 requests, greedy and sampled; repeats taken in turn."""
    from engine_cuda import timed

    # SGLang's chain builds a sampler for a minute and a half at its first sampled token.
    temperatures = (0.0, 1.0) if role != "dflash" else (0.0,)
    rows = []
    for conc in (1, 8):
        for temperature in temperatures:
            params = {"temperature": temperature, "max_new_tokens": TIMED_NEW, "ignore_eos": True}
            if temperature:
                params["sampling_seed"] = 11
            runs: dict[str | None, list[dict[str, float]]] = {}
            for repeat in range(repeats + 1):
                for policy in policies_of(engine):
                    with under(policy):
                        rate = timed(engine, prompts(8)[:conc], params)
                    if repeat:
                        runs.setdefault(policy, []).append(rate.as_dict())
            for policy, rates in runs.items():
                best = {k: statistics.median(r[k] for r in rates) for k in rates[0]}
                spread = [r["tokens_per_s"] for r in rates]
                rows.append(
                    {"policy": str(policy), "conc": conc, "T": temperature, "runs": spread} | best
                )
    return rows


def time_long(engine: Any) -> list[dict[str, Any]]:
    """One request of a long prompt."""
    import random

    from engine_cuda import timed

    draw = random.Random(3)
    prompt = [draw.randrange(5, 4096) for _ in range(LONG_CONTEXT)]
    rows = []
    for policy in policies_of(engine):
        params = {"temperature": 0.0, "max_new_tokens": 100, "ignore_eos": True}
        with under(policy):
            timed(engine, [prompt], params | {"max_new_tokens": 8})
            rows.append({"policy": str(policy)} | timed(engine, [prompt], params).as_dict())
    return rows


def profile(engine: Any) -> dict[str, str]:
    """Where the time of a step goes: host and device, one request, a tree of 15."""
    import torch
    from torch.profiler import ProfilerActivity

    tracer = torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
    with under("tree-15" if policies_of(engine) == POLICIES else None):
        rid = engine.submit(prompts(1)[0], GREEDY | {"max_new_tokens": 600})
        engine.step(20)
        engine.at_boundary(_start, tracer)
        engine.step(30)
        engine.at_boundary(_stop, tracer)
        engine.abort(rid)
        engine.step(4)
    averages = tracer.key_averages()
    return {
        "steps": "30",
        "device": averages.table(sort_by="self_cuda_time_total", row_limit=40)[:14000],
        "host": averages.table(sort_by="self_cpu_time_total", row_limit=45)[:14000],
    }


def _start(scheduler: Any, tracer: Any) -> None:
    del scheduler
    tracer.start()


def _stop(scheduler: Any, tracer: Any) -> None:
    del scheduler
    tracer.stop()


def main() -> None:
    role, out = sys.argv[1], Path(sys.argv[2])
    report, lock = Report(role, out), out / "lock"
    begun = time.monotonic()
    engine = None
    with turn(lock, alone=False):
        try:
            engine = build(role, out)
        except BaseException:
            text = traceback.format_exc()
            print(text, flush=True)
            report.content["errors"]["build"] = text[-4000:]
            report.put("failed", ["build"])
            os._exit(1)
        report.put("start_seconds", time.monotonic() - begun)
        ours = policies_of(engine) == POLICIES
        if not role.startswith("long"):
            report.attempt("greedy", lambda: say_greedy(engine))
        if not role.startswith("long") and role != "dflash":  # it returns no log-probabilities
            report.attempt("gaps", lambda: say_gaps(engine))
            report.attempt("sampled", lambda: say_sampled(engine))
        if ours and not role.startswith("long"):
            report.attempt("ruled", lambda: say_ruled(engine))
            report.attempt("steps", lambda: say_steps(engine))
    if not role.startswith("fp32"):
        wait_for(out, sys.argv[3:])
        with turn(lock, alone=True):
            if role.startswith("long"):
                report.attempt("long_times", lambda: time_long(engine))
            else:
                repeats = 1 if role in ("eager", "triton", "parts") else REPEATS
                report.attempt("times", lambda: time_short(engine, role, repeats))
            if role in ("ours", "dflash"):
                report.attempt("profile", lambda: profile(engine))
            if role == "ours":
                report.attempt("nodes", lambda: say_node_logits(engine))
                said = report.content.get("sampled", {})
                report.attempt("partings", lambda: say_partings(engine, said))
    elif ours:
        report.attempt("nodes", lambda: say_node_logits(engine))
    (out / f"{role}.done").touch()
    if ours:
        report.attempt("steps_after", lambda: say_steps(engine))
    report.put("seconds", time.monotonic() - begun)
    os._exit(0)


if __name__ == "__main__":
    main()
