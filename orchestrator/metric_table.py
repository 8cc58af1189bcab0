"""Every metric that Overstory exports: for code, `docs/metrics.md`, dashboards and alerts.

Pure. In Ray's export a metric is `ray_overstory_NAME`, in the gateway's `/metrics` it is
`overstory_NAME`; a counter's name ends with `_total` in both.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds of histograms of seconds."""
STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
"""The same for times between tokens."""


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: without prefix, and for a counter without `_total`.
        kind: what it is.
        unit: of a value.
        help: what it counts or measures.
        labels: beside `deployment`, which all have.
        buckets: of a histogram.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        """As `/metrics` has it."""
        return f"overstory_{self.name}" + ("_total" if self.kind == "counter" else "")

    @property
    def ray_name(self) -> str:
        """As Ray's export has it."""
        return f"ray_{self.full_name}"


def _counter(name: str, unit: str, text: str, *labels: str) -> Metric:
    return Metric(name, "counter", unit, text, labels)


def _gauge(name: str, unit: str, text: str, *labels: str) -> Metric:
    return Metric(name, "gauge", unit, text, labels)


def _seconds(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Metric:
    return Metric(name, "histogram", "seconds", text, labels, buckets)


GATEWAY = (
    _counter(
        "requests", "requests",
        "Requests to generate that have ended, by outcome: ok, aborted (the client left), or the "
        "code of the error",
        "endpoint", "outcome",
    ),
    _counter("http_answers", "answers", "HTTP answers of any route", "status"),
    _counter("prompt_tokens", "tokens", "Prompt tokens of requests that were let in", "endpoint"),
    _counter("generated_tokens", "tokens", "Tokens generated for requests", "endpoint"),
    _seconds("queue_seconds", "Wait of a request for its place in the engine", SECONDS),
    _seconds(
        "time_to_first_token_seconds",
        "From a request's arrival, its wait included, to the first text of any of its choices",
        SECONDS, "endpoint",
    ),
    _seconds(
        "inter_chunk_seconds",
        "Between two pieces of a choice of a streamed answer; a piece is what one step commits",
        STEP_SECONDS, "endpoint",
    ),
    _seconds(
        "time_per_output_token_seconds",
        "After the first piece: time of a request by its further tokens, over all its choices",
        STEP_SECONDS, "endpoint",
    ),
    _seconds("request_seconds", "From a request's arrival to its end", SECONDS, "endpoint"),
    _counter(
        "sequences_moved", "moves",
        "Sequences that went on on another replica, by why: lost, leaving (a restart, fewer "
        "replicas), busy (the next one could not take it yet)",
        "why",
    ),
    _gauge("sequences_running", "sequences", "Sequences that hold a place in the engine"),
    _gauge("sequences_limit", "sequences", "Most sequences that may run now"),
    _gauge("requests_queued", "requests", "Requests that wait for a place"),
    _gauge("ready", "0 or 1", "Whether the endpoint can generate"),
)  # fmt: skip
"""Of a gateway process."""

CONTROLLER = (
    _counter("verify_steps", "steps", "Verify forwards of a rank", "replica", "rank", "policy"),
    _counter("verify_requests", "requests", "Requests in them", "replica", "rank", "policy"),
    _counter("verify_rows", "rows", "Target rows in them", "replica", "rank", "policy"),
    _counter("verify_tokens", "tokens", "Tokens that they committed", "replica", "rank", "policy"),
    _counter(
        "draft_offered", "requests", "Requests that had a draft node at this depth",
        "replica", "policy", "depth",
    ),
    _counter(
        "draft_accepted", "requests", "Requests whose accepted path reached this depth",
        "replica", "policy", "depth",
    ),
    _counter(
        "stage_seconds", "seconds",
        "A rank's own time in a stage of verify steps; its device's at work, and idle between two",
        "replica", "rank", "stage",
    ),
    _counter("prefill_steps", "steps", "Prefill forwards of a rank", "replica", "rank"),
    _counter("prefill_tokens", "tokens", "Prompt tokens that they computed", "replica", "rank"),
    _gauge("steps_per_second", "1/s", "Batches launched, between two reports", "replica", "rank"),
    _gauge("tokens_per_second", "tokens/s", "Tokens committed, likewise", "replica", "rank"),
    _gauge("tokens_per_step", "tokens", "Tokens that a step commits of one request", "replica"),
    _gauge("tree_policy", "0 or 1", "The tree policy in force has 1", "replica", "policy"),
    _gauge(
        "draft_candidate_share", "share",
        "Share of tried nodes that were accepted lately, in steps that are looked at (one in 32 ms "
        "at most under a fixed policy), by the drafter's rank of them (0 is its best), depth, "
        "whether their parent is of first candidates alone (spine), and kind of request (greedy, "
        "sampled)",
        "replica", "kind", "parent", "depth", "candidate",
    ),
    _counter(
        "drafter_switched_off", "times",
        "The automatic policy found that the drafter does not fit its model", "replica",
    ),
    _gauge(
        "drafter_in_use", "0 or 1", "The automatic policy drafts, or tries to again", "replica"
    ),
    _counter(
        "stood_seconds", "seconds",
        "Time of iterations of rank 0 that were longer than 0.25 s: prefills, what is compiled or "
        "loaded for the first time, commands at boundaries",
        "replica",
    ),
    _gauge("engine_running", "requests", "Requests in the running batch", "replica"),
    _gauge("engine_waiting", "requests", "Requests in the engine's own queue", "replica"),
    _gauge(
        "kv_slots", "slots", "KV slots of a rank by state: used, cached (prefix cache only), free",
        "replica", "rank", "state",
    ),
    _gauge(
        "kv_neighbours", "share",
        "Of neighbouring rows of requests, the share that are neighbours in the KV pool; 1 is not "
        "fragmented",
        "replica",
    ),
    _gauge("report_age_seconds", "seconds", "Age of a rank's last report", "replica", "rank"),
    _gauge("replicas", "replicas", "Replicas by the controller's phase", "phase"),
    _gauge("replica_health", "replicas", "Replicas by state of health", "state"),
    _counter(
        "faults", "faults",
        "Faults of replicas by kind: SUSPECT, DEAD, given_up (its restart budget is spent), "
        "condemned (its ranks differed). Replicas that end as they are told are none",
        "kind",
    ),
    _counter("kv_handed_over_bytes", "bytes", "KV that came from replicas that go"),
    _counter("kv_hand_over_seconds", "seconds", "Time that ranks stood still to take it"),
    _counter("kv_hand_over_wait_seconds", "seconds", "Time that sequences waited for it"),
    _counter("kv_hand_over_meet_seconds", "seconds", "Time that ranks took to meet for it"),
    _counter(
        "kv_hand_overs", "sequences",
        "Sequences that moved while their KV could be had, by outcome: moved (with all of it), "
        "computed (again, in part or whole)",
        "outcome",
    ),
)  # fmt: skip
"""Of the deployment's controller, which reads the ranks' reports."""

METRICS = {metric.name: metric for metric in (*GATEWAY, *CONTROLLER)}
"""By name."""


_HEAD = """# Metrics

Generated by `python -m overstory.orchestrator.metric_table`; a test compares.

Ray's agents export every metric on each node, with `ray_` before its name; a gateway's own are
also at its `/metrics`, without it. All have the label `deployment`. Counters end with `_total`; a
histogram has `_bucket`, `_sum` and `_count`. Dashboards and alerts: `clusters/monitoring/`.

SGLang's own metrics are passed on with `engine.enable_metrics: true`, as `ray_sglang_...`:
[monitoring.md](monitoring.md)."""

_RULE = "|---|---|---|---|---|"


def as_markdown() -> str:
    """`docs/metrics.md`."""
    lines = [_HEAD]
    for title, metrics in (("Gateway", GATEWAY), ("Controller", CONTROLLER)):
        lines += ["", f"## {title}", "", "| metric | kind | unit | labels | what |", _RULE]
        lines += [
            f"| `{m.full_name}` | {m.kind} | {m.unit} | {', '.join(m.labels)} | {m.help} |"
            for m in metrics
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(as_markdown(), end="")
