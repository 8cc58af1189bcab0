"""One engine on one GPU: what it says, then how fast. See engine_session.sh, which starts them.

    engine_runs.py ROLE OUT ALL_ROLES...

Writes OUT/ROLE.json. All roles say their texts side by side; then `ours`, `stock` and `dflash` are
timed in turn (`engine_bench.py`), then long contexts, profiles and the rest, one at a time. `pairs`
compares `auto` to fixed policies and leases to none (`engine_pairs.py`), `stages` says where the
device's time goes by its own clock (OVERSTORY_DEVICE_TIMES), `host` says where the
host's time of a step goes (`engine_host.py`), `leases` what leases cost, and what part of them;
they say no texts. When all has to end by is in ENGINE_SESSION_UNTIL, seconds since the epoch.
ENGINE_SESSION_TOY=1 rehearses `pairs`, `host` and `leases` on a CPU.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

NEW = 96
POLICIES = ("plain", "chain", "tree-15", "tree-31")
TIMED_LONG = ("plain", "chain", "tree-15", "tree-31")
LONG_CONTEXT = 32768
GREEDY = {"temperature": 0.0, "max_new_tokens": NEW, "ignore_eos": True}
ROWS = 64
RINGED = ("ours", "stock", "dflash")
UNTIL = float(os.environ.get("ENGINE_SESSION_UNTIL", time.time() + 600))
"""When everything has to have ended."""
SAYS = os.environ.get("ENGINE_SESSION_TEXTS", "1") != "0"
"""Whether texts are said and compared, or speeds alone are measured."""

AFTER_S = 50 if SAYS else 30
"""Seconds kept for what comes after the speeds."""


TOY = os.environ.get("ENGINE_SESSION_TOY") == "1"

LEASES_S = int(os.environ.get("ENGINE_SESSION_LEASES", "20"))
"""Seconds that `pairs` keeps for leases; a pair of texts takes a fifth of one."""

POOL = 393216
"""KV slots of `pairs` and `host`: 64 requests of the longest texts, and a cache of ended ones."""

SPARE = 8
"""Requests beyond those that run: one that ends is still counted where its successor comes."""

STAGES_S = 30
"""Seconds of them that `stages` may hold `pairs` up for."""


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
def saying(out: Path) -> Iterator[None]:
    """Side by side with the others that say texts."""
    with (out / "texts.lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        yield


def wait_for_texts(out: Path, deadline: float) -> bool:
    """Until nobody says texts any more, or time is up: one that hangs does not hold the rest.

    Returns:
        whether nobody does.
    """
    with (out / "texts.lock").open("a") as held:
        while time.time() < deadline:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            time.sleep(0.05)
    return False


@contextlib.contextmanager
def alone(out: Path) -> Iterator[None]:
    """The only one on the machine that does anything."""
    with (out / "alone.lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def prompts(count: int) -> list[list[int]]:
    """Held-out code, of different lengths."""
    from overstory.workers.tiny.prompts import heldout_prompts

    every = [list(prompt.ids) for prompt in heldout_prompts()]
    return [every[i % len(every)][: 160 - 13 * (i % 8)] for i in range(count)]


def common(port: int, sizes: Sequence[int] = (1, 8)) -> dict[str, Any]:
    return {
        "sampling_backend": "pytorch",
        "disable_prefill_cuda_graph": True,
        "cuda_graph_bs_decode": list(sizes),
        "max_running_requests": max(sizes),
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
    """float32 for SGLang on CUDA: norms, activations, rotary embeddings, experts and the router in
    torch, whose kernels in SGLang take 16 bits; Triton's tiles small enough for twice the bytes,
    and its products in three passes instead of TF32's one."""
    os.environ["TRITON_F32_DEFAULT"] = "tf32x3"
    from overstory.workers.environment import prepare_process

    prepare_process("cuda")  # before SGLang is there
    import torch
    from sglang.kernels.ops.attention import dsv4, extend_attention
    from sglang.srt.layers.moe.fused_moe_native import fused_moe_forward_native
    from sglang.srt.layers.utils.multi_platform import MultiPlatformOp

    given = MultiPlatformOp.dispatch_forward

    def dispatch(layer: Any) -> Any:
        name = type(layer).__name__
        if name == "UnquantizedFusedMoEMethod":
            return fused_moe_forward_native
        native = name in ("RMSNorm", "SiluAndMul") or "Rotary" in name
        return layer.forward_native if native else given(layer)

    tiles = extend_attention._get_block_sizes_for_extend_attention

    def small_tiles(keys: int, values: int) -> tuple[int, ...]:
        return (*tiles(keys, values)[:3], 16, 32, 4)

    MultiPlatformOp.dispatch_forward = dispatch
    extend_attention._get_block_sizes_for_extend_attention = small_tiles
    dsv4.linear_bf16_fp32 = torch.nn.functional.linear


def name_of(role: str) -> str:
    """The kind of engine: a role less what it is run with."""
    return role.partition("_")[2] if role.startswith(("long", "fp32")) else role


def build(role: str, out: Path) -> Any:
    """The engine of a role."""
    if role.startswith("fp32"):
        native_layers()
    from engine_cuda import CudaEngine, StockEngine

    from overstory.workers.tiny.paths import resolve_model

    pair = (resolve_model("overstory-tiny"), resolve_model("overstory-tiny-drafter"))
    port = 31000 + 97 * (sum(map(ord, role)) % 200)
    from engine_bench import SIZES

    fields = common(port, SIZES if role in RINGED else (1, 8))
    if role in ("pairs", "host"):
        fields = common(port, sizes := sorted({1, *sizes_of(role)}))
        fields |= {"max_running_requests": max(sizes) + SPARE, "max_total_tokens": POOL}
    if TOY:
        return toy_engine(pair, fields)
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
    if name in ("ours", "pairs", "host", "stages", "leases"):
        return CudaEngine(pair[0], **fields, **ddtree(pair[1], attention_backend="overstory"))
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


def sizes_of(role: str) -> set[int]:
    """Requests that a role runs at a time."""
    import engine_host
    import engine_pairs

    shapes = engine_pairs.asked_shapes() if role == "pairs" else engine_host.SHAPES
    return {shape.requests for shape in shapes}


def toy_engine(pair: tuple[str, str], fields: dict[str, Any]) -> Any:
    """An engine of ours on a CPU, for a rehearsal."""
    from engine_cuda import CudaEngine

    CudaEngine.device = "cpu"
    on_cuda = ("cuda_graph_bs_decode", "disable_prefill_cuda_graph", "mem_fraction_static")
    own = {name: value for name, value in fields.items() if name not in on_cuda}
    return CudaEngine(pair[0], **own, **ddtree(pair[1]))


def toy_sizes() -> None:
    """A rehearsal's: a step on a CPU takes some dozens of times as long."""
    import engine_bench
    import engine_host
    import engine_pairs

    engine_bench.MEASURE_SECONDS = 2.0
    engine_pairs.NEW, engine_pairs.NEW_SAMPLED, engine_pairs.NEW_OF_MANY = 96, 64, 96
    engine_pairs.LEARN_MESSAGES, engine_pairs.ROUNDS, engine_pairs.CHOOSING_ROUNDS = 10, 4, 2
    engine_host.ROUNDS, engine_host.ROUND_MESSAGES, engine_host.PROFILED_MESSAGES = 2, 10, 40
    shapes = [engine_pairs.Shape(1, 0.0), engine_pairs.Shape(2, 0.0)]
    engine_host.SHAPES = (*shapes, engine_pairs.Shape(1, 1.0))
    engine_host.PROFILED = [(shape, policy) for shape in shapes for policy in ("auto", "tree-63")]


@contextlib.contextmanager
def under(policy: str | None) -> Iterator[None]:
    if policy is not None:
        from overstory.workers import tree_policy

        tree_policy.set_current(tree_policy.parse_policy(policy))
    yield


def policies_of(engine: Any) -> tuple[str | None, ...]:
    return POLICIES if engine.scheduler.server_args.speculative_algorithm == "DDTREE" else (None,)


def say_greedy(engine: Any, policies: Sequence[str | None] = ()) -> dict[str, list[list[int]]]:
    said = {}
    for policy in policies or policies_of(engine):
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
    return _gaps(engine, rids)


def _gaps(engine: Any, rids: Sequence[str]) -> list[list[float]]:
    every = [engine.outputs[rid].top_logprobs for rid in rids]
    return [
        [max(best.values()) - min(best.values()) for best in of_request] for of_request in every
    ]


def say_logprobs(engine: Any) -> dict[str, list[dict[str, Any]]]:
    """Greedy texts, with the log-probabilities of their tokens and of the best four everywhere."""
    said = {}
    for policy in policies_of(engine):
        with under(policy):
            engine.flush_cache()
            rids = engine.texts(prompts(4), GREEDY, return_logprob=True, top_logprobs_num=4)
        said[str(policy)] = [
            {
                "ids": engine.outputs[rid].ids,
                "logprobs": engine.outputs[rid].logprobs,
                "best": [
                    {str(token): value for token, value in place.items()}
                    for place in engine.outputs[rid].top_logprobs
                ],
            }
            for rid in rids
        ]
    return said


@contextlib.contextmanager
def without_graphs(engine: Any) -> Iterator[None]:
    """Every forward and every step in small launches."""
    worker = engine.scheduler.model_worker
    runners = (worker.model_runner, worker.draft_model_runner)
    kept = worker._step_graphs, worker._tiers, [r.decode_cuda_graph_runner for r in runners]
    worker._step_graphs = worker._tiers = None
    for runner in runners:
        runner.decode_cuda_graph_runner = None
    try:
        yield
    finally:
        worker._step_graphs, worker._tiers, graphs = kept
        for runner, graph in zip(runners, graphs, strict=True):
            runner.decode_cuda_graph_runner = graph


def say_without_graphs(engine: Any) -> dict[str, Any]:
    with without_graphs(engine):
        return say_greedy(engine)


def say_kernel_logits(engine: Any) -> list[dict[str, float]]:
    """The same verify forward by our kernel and by SGLang's Triton backend with the tree's mask.

    Returns:
        of each row in use: its depth, the largest difference of its logits, the largest logit, and
        the gap of Triton's best two where the best token differs (else 0).
    """
    import torch
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    import overstory.workers.ddtree.worker as module
    from overstory.workers.ddtree.verify import row_layout

    worker, found = engine.scheduler.model_worker, []
    runner, given = worker.model_runner, module.verify
    triton = TritonAttnBackend(runner)

    def both(target: Any, batch: Any, tree: Any, slots: Any, layout: Any, branches: bool) -> Any:
        ours, runner.attn_backend = runner.attn_backend, triton
        kept, mode = runner.decode_cuda_graph_runner, batch.forward_mode
        runner.decode_cuda_graph_runner = None
        plain = row_layout(tree, batch.seq_lens, worker.last_position, with_words=False)
        try:
            other = given(target, batch, tree, slots, plain, branches)
            wanted = other.logits_output.next_token_logits.float().clone()
        finally:
            runner.attn_backend, runner.decode_cuda_graph_runner = ours, kept
            batch.forward_mode = mode
        result = given(target, batch, tree, slots, layout, branches)  # writes its own KV
        seen = result.logits_output.next_token_logits.float()
        used = torch.arange(tree.rows, device=seen.device) < tree.sizes.unsqueeze(1)
        best = wanted.topk(2, dim=-1).values
        apart = wanted.argmax(-1) != seen.argmax(-1)
        columns = torch.stack(
            [
                tree.depths.view(-1).float(),
                (wanted - seen).abs().amax(-1),
                best[:, 0],
                (best[:, 0] - best[:, 1]) * apart,
            ],
            dim=1,
        )[used.view(-1)]
        names = ("depth", "difference", "logit", "gap")
        found.extend(dict(zip(names, row, strict=True)) for row in columns.tolist())
        return result

    module.verify = both
    try:
        for policy in ("chain", "tree-31"):
            with under(policy):
                engine.flush_cache()
                asked = GREEDY | {"max_new_tokens": 48}
                engine.texts(prompts(4), asked, return_logprob=True)  # so that steps run in parts
    finally:
        module.verify = given
    return found


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

    Where top-p or top-k cuts, a token at the edge moves the bounds by its whole share when rounding
    lets it in or out: `edge` is how far the sum of the best shares is from top-p there, and
    `edge_shift` the shift with one token more or one less.
    """
    found = []
    for policy in POLICIES[1:]:
        for i, (text, plain) in enumerate(zip(said[policy], said["plain"], strict=True)):
            at = next((k for k, (a, b) in enumerate(zip(text, plain, strict=True)) if a != b), None)
            if at is not None and at > 0 and sampled_params()[i]["temperature"] > 0:
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
    edge, others = _edge(engine, context, params)
    return {
        "policy": policy,
        "text": i,
        "token": at,
        "u": u,
        "shift": _shift(first, u, (text[at], plain[at])),
        "spread": spread,
        "edge": edge,
        "edge_shift": min(
            (_shift(other, u, (text[at], plain[at])) for other in others), default=None
        ),
    }


def _shift(bounds: Any, u: float, tokens: tuple[int, int]) -> float:
    """How far a bound of cumulative ``bounds`` is from u that must pass it to give either token."""
    shifts = []
    for token in tokens:
        low, high = (float(bounds[token - 1]) if token else 0.0), float(bounds[token])
        shifts.append(max(low - u, u - high, 0.0))
    return max(shifts)


def _edge(
    engine: Any, context: list[int], params: dict[str, Any]
) -> tuple[float | None, list[Any]]:
    """How far the kept tokens' sum is from top-p, and the cumulative distributions with one token
    more and one less; None and none without top-p."""
    import torch

    if "top_p" not in params:
        return None, []
    shares = torch.softmax(_logprobs_after(engine, context) / params["temperature"], dim=0)
    order = shares.argsort(descending=True)
    sums = shares[order].cumsum(0)
    kept = int((sums - shares[order] < params["top_p"]).sum())
    others = []
    for count in (kept - 1, kept + 1):
        if count >= 1:
            some = torch.zeros_like(shares)
            some[order[:count]] = shares[order[:count]]
            others.append((some / some.sum()).cumsum(0))
    near = min(abs(float(sums[n - 1]) - params["top_p"]) for n in (kept, kept - 1) if n >= 1)
    return near, others


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


def say_ruled(engine: Any, report: Report) -> dict[str, Any]:
    """Texts under rules for logits; the gaps of plain's best two, after the rules, apart."""
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
            rids = engine.texts(prompts(8), params, return_logprob=True, top_logprobs_num=2)
        said[str(policy)] = [engine.outputs[rid].ids for rid in rids]
        if len(said) == 1:
            report.put("ruled_gaps", _gaps(engine, rids))
    return said


def say_steps(engine: Any) -> dict[str, Any]:
    """What the counters of our steps hold, and that no kernel met bad values."""
    import torch

    from overstory.kernels import ops
    from overstory.workers.step_stats import STATS

    if not TOY:
        ops.raise_bad_input(torch.device("cuda", torch.cuda.current_device()))
    tiers = engine.scheduler.model_worker._tiers
    return {"steps": STATS.snapshot()["verify"], "tiers": list(tiers.rows) if tiers else None}


def time_long(engine: Any, put: Callable[[list[dict[str, Any]]], None]) -> list[dict[str, Any]]:
    """One request of a long prompt."""
    import random

    from engine_cuda import timed

    draw = random.Random(3)
    prompt = [draw.randrange(5, 4096) for _ in range(LONG_CONTEXT)]
    rows = []
    for policy in TIMED_LONG:
        params = {"temperature": 0.0, "max_new_tokens": 60, "ignore_eos": True}
        with under(policy):
            timed(engine, [prompt], params | {"max_new_tokens": 4})
            runs = [timed(engine, [prompt], params).as_dict() for _ in range(2)]
        rows += [{"policy": policy, "run": number, **run} for number, run in enumerate(runs)]
        put(rows)
    return rows


def profile(engine: Any) -> dict[str, Any]:
    """Where the time of a step goes, one request, a tree of 15 or SGLang's chain: milliseconds of
    the device, of a step without the profiler, and the tables of both."""
    import torch
    from torch.profiler import ProfilerActivity

    steps, plain = 60, 200
    tracer = torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
    with under("tree-15" if policies_of(engine) == POLICIES else None):
        rid = engine.submit(prompts(1)[0], GREEDY | {"max_new_tokens": 4000})
        engine.step(20)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        engine.run_steps(plain)
        step_ms = 1e3 * (time.perf_counter() - begun) / plain
        engine.at_boundary(_start, tracer)
        engine.run_steps(steps)
        engine.at_boundary(_stop, tracer)
        engine.abort(rid)
        engine.step(4)
    averages = tracer.key_averages()
    # SGLang's annotations span kernels, and operators count what their kernels do.
    kernels = [
        event
        for event in averages
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]
    device_ms = sum(event.self_device_time_total for event in kernels) / 1e3 / steps
    return {
        "device_ms": device_ms,
        "step_ms": step_ms,
        "host_ms": step_ms - device_ms,
        "launches": sum(e.count for e in averages if "Launch" in e.key) / steps,
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
    role, out, roles = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    if role == "stages":
        os.environ["OVERSTORY_DEVICE_TIMES"] = "1"
    if TOY:
        toy_sizes()
    report, begun = Report(role, out), time.monotonic()
    with saying(out):
        try:
            engine = build(role, out)
        except BaseException:
            text = traceback.format_exc()
            print(text, flush=True)
            report.content["errors"]["build"] = text[-4000:]
            report.put("failed", ["build"])
            os._exit(1)
        report.put("start_seconds", time.monotonic() - begun)
        if not role.startswith(("long", "pairs", "host", "stages", "leases")):
            say(engine, role, report)
    if not role.startswith("fp32"):
        report.put("texts_over", wait_for_texts(out, UNTIL - 110))
    if role in RINGED:
        bench(engine, role, [other for other in roles if other in RINGED], out, report)
    if role.startswith("long"):
        wait_for_bench(out, [other for other in roles if other in RINGED])
        with alone(out):
            report.attempt(
                "long_times", lambda: time_long(engine, lambda rows: report.put("long", rows))
            )
    if role == "stages":
        with alone(out):
            stage_times(engine, report)
    if role == "pairs":
        wait_for_bench(out, [other for other in roles if other in RINGED])
        if "stages" in roles:
            wait_for_role(out, "stages", time.time() + STAGES_S)
        with alone(out):
            in_pairs(engine, report)
    if role == "host":
        with alone(out):
            host_time(engine, report)
    if role == "leases":
        with alone(out):
            lease_costs(engine, report)
    after(engine, role, out, report)
    report.put("seconds", time.monotonic() - begun)
    os._exit(0)


def say(engine: Any, role: str, report: Report) -> None:
    """Texts, side by side with other roles."""
    if SAYS:
        report.attempt("greedy", lambda: say_greedy(engine))
    if role == "dflash":  # it returns no log-probabilities; it builds its sampler for a minute and
        # a half, at its first sampled token
        sampled = GREEDY | {"temperature": 1.0, "max_new_tokens": 4}
        report.attempt("sampler", lambda: len(engine.texts(prompts(1), sampled)))
        return
    if not SAYS:
        return
    report.attempt("gaps", lambda: say_gaps(engine))
    report.attempt("logprobs", lambda: say_logprobs(engine))
    if role == "ours":
        report.attempt("sampled", lambda: say_sampled(engine))
        report.attempt("ruled", lambda: say_ruled(engine, report))
        report.attempt("steps", lambda: say_steps(engine))
    if role == "fp32_triton":  # before anything is timed
        report.attempt("nodes", lambda: say_node_logits(engine))


def bench(engine: Any, role: str, ringed: list[str], out: Path, report: Report) -> None:
    """This engine's part of the speeds."""
    import engine_bench

    policies: tuple[str | None, ...] = (None,)
    if role == "ours":
        with alone(out):
            policies = engine_bench.POLICIES if learnt(engine, report) else POLICIES
    file = out / f"bench-{role}.jsonl"
    timer = engine_bench.Bench(engine, policies, prompts, under, file)

    samples = role != "dflash" or "sampler" in report.content

    def cell(one: engine_bench.Cell) -> None:
        if samples or one.temperature == 0:
            timer.cell(one)

    ring = engine_bench.Ring(role, ringed, out, UNTIL - 100, UNTIL - AFTER_S)
    report.attempt("cells", lambda: ring.run(lambda: alone(out), cell))
    report.put("bench", timer.rows)


def in_pairs(engine: Any, report: Report) -> None:
    """`auto` against the best fixed policies, then leases on against off."""
    import engine_bench
    import engine_pairs
    from machine_noise import quiet_and_watched

    learnt(engine, report)  # without it leases are measured all the same
    noise: dict[str, float] = {}
    with quiet_and_watched(noise):
        report.attempt(
            "pairs",
            lambda: engine_pairs.measure(
                engine_pairs.opened_in(engine, prompts(64)),
                UNTIL - LEASES_S,
                lambda rows: report.put("pairs", rows),
                engine_pairs.asked_rivals(),
                engine_pairs.asked_shapes(),
                about=engine_pairs.Watch(engine).about,
            ),
        )
    report.put("noise", noise)
    report.attempt(
        "leases", lambda: engine_bench.leases(engine, prompts(1)[0], under, UNTIL - 2, 1000)
    )
    report.attempt("auto", lambda: engine.scheduler.draft_worker.chooser.report())
    report.attempt("steps_after", lambda: say_steps(engine))


def learnt(engine: Any, report: Report) -> bool:
    """Measures the cost table that `auto` chooses by; whether that went well."""
    import engine_bench

    def learn() -> Any:
        engine.flush_cache()
        return engine.at_boundary(engine_bench.learn_costs)[0]

    report.attempt("costs", learn)
    return "costs" not in report.content["errors"]


def lease_costs(engine: Any, report: Report) -> None:
    """Leases against none for 60% of the time, then what part of them costs what; texts of some 400
    steps."""
    import engine_bench

    begun, tokens = time.time(), 160 if TOY else 3000
    for name, kinds, until in (
        ("leases", ("leased", "leased_500"), begun + 0.6 * (UNTIL - begun)),
        ("lease_parts", ("harness", "gate", "digests"), UNTIL - 2),
    ):
        measured = lambda kinds=kinds, until=until: engine_bench.leases(  # noqa: E731
            engine, prompts(1)[0], under, until, 2000, kinds, tokens
        )
        report.attempt(name, measured)


def host_time(engine: Any, report: Report) -> None:
    """What the host takes of a step, and where."""
    import engine_host
    import engine_pairs
    from machine_noise import quiet_and_watched

    if not learnt(engine, report):
        return
    opened, begun = engine_pairs.opened_in(engine, prompts(64)), time.time()
    with quiet_and_watched({}):
        report.attempt(
            "steps_ms", lambda: engine_host.steps_ms(opened, begun + (UNTIL - begun) * 0.6)
        )
        report.attempt("host_profiles", lambda: engine_host.profiles(opened, UNTIL - 8))


def stage_times(engine: Any, report: Report) -> None:
    """Where the time of each policy's step goes, by the device's clock; of steps in parts (asked
    for by log-probabilities) also their launches by stage."""
    from engine_cuda import timed
    from machine_noise import quiet_and_watched

    from overstory.workers.step_stats import STATS

    timed_ones = [*POLICIES, "tree-63", *(["auto"] if learnt(engine, report) else [])]
    rows: dict[str, dict[str, Any]] = {}
    with quiet_and_watched({}):
        for count in (1, 8):
            for policy in timed_ones:
                with under(policy):
                    timed(engine, prompts(count), GREEDY)
                    before = STATS.snapshot()["verify"]
                    timed(engine, prompts(count), GREEDY | {"max_new_tokens": 256})
                    after = STATS.snapshot()["verify"]
                rows[f"{policy}, {count} requests"] = stages_of(before, after)
                report.put("stages", rows)
        for policy in POLICIES:
            with under(policy):
                engine.texts(prompts(1), GREEDY, return_logprob=True)
                before = STATS.snapshot()["verify"]
                engine.texts(prompts(1), GREEDY, return_logprob=True)
                after = STATS.snapshot()["verify"]
            rows[f"{policy}, 1 request, in parts"] = stages_of(before, after)
            report.put("stages", rows)


def stages_of(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Of the steps between two snapshots, all policies together: how many, and microseconds of one
    on the device, idle until the next one, and of the host's stages."""
    sums: dict[str, float] = {}
    for policy, row in after.items():
        old = before.get(policy, {})
        counts = {name: row[name] - old.get(name, 0) for name in ("forwards", "idle_gaps")}
        spent = {name: row[name] - old.get(name, 0) for name in ("device_ns", "idle_ns")}
        stages = old.get("stage_ns", {})
        spent |= {name: ns - stages.get(name, 0) for name, ns in row["stage_ns"].items()}
        for name, value in {**counts, **spent}.items():
            sums[name] = sums.get(name, 0) + value
    steps, gaps = sums.pop("forwards"), sums.pop("idle_gaps")
    idle = sums.pop("idle_ns") / 1e3 / gaps if gaps else None
    return {
        "steps": steps,
        "idle_us": idle,
        **{f"{name.removesuffix('_ns')}_us": ns / 1e3 / max(steps, 1) for name, ns in sums.items()},
    }


def wait_for_role(out: Path, role: str, until: float) -> None:
    """Until a role has ended, or time is up."""
    while time.time() < until and not (out / f"{role}.done").exists():
        time.sleep(0.1)


def wait_for_bench(out: Path, ringed: list[str]) -> None:
    """Until all that are timed in turn are through, or have ended."""
    over = {role: (out / f"{role}.cell", out / f"{role}.done") for role in ringed}
    while time.time() < UNTIL - AFTER_S + 5:
        if all(
            done.exists() or (cell.exists() and len(cell.read_text()) == 7)
            for cell, done in over.values()
        ):
            return
        time.sleep(0.1)


def after(engine: Any, role: str, out: Path, report: Report) -> None:
    """What is left when the speeds are there, the most wanted first."""
    if role in ("ours", "dflash"):
        with alone(out):
            report.attempt("profile", lambda: profile(engine))
    if role == "ours":
        import engine_bench

        with alone(out):
            leased = lambda: engine_bench.leases(  # noqa: E731
                engine, prompts(1)[0], under, min(time.time() + 16, UNTIL - (AFTER_S // 2 - 5))
            )
            report.attempt("leases", leased)
        chooser = engine.scheduler.draft_worker.chooser
        report.attempt("auto", lambda: chooser.report())
        report.attempt("steps_after", lambda: say_steps(engine))
        if not SAYS:
            return
        report.attempt("greedy_without_graphs", lambda: say_without_graphs(engine))
        report.attempt("kernel_logits", lambda: say_kernel_logits(engine))
        said = report.content.get("sampled", {})
        report.attempt("partings", lambda: say_partings(engine, said))
        report.attempt("nodes", lambda: say_node_logits(engine))
        report.attempt("greedy_spine", lambda: say_greedy(engine, ("plain", "spine-15")))


if __name__ == "__main__":
    main()
