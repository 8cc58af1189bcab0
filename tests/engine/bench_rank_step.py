"""What a rank's own thread pays for each part of a step beside the forwards. Results:
docs/benchmarks/cpu_step.md.

A real `RankHost` in this process with its event loop, hooks, gate, digests and counters; a thread
of it grants leases as a controller does, and a process beside it takes the tokens. Medians of wall
time: on a busy machine sums count other processes too. Beside them CPU time of all calls together,
which holds what comes seldom. The forwards in between leave nothing in the caches, so a part takes
several times what it takes in a loop of its own.

`--ahead` has the automatic rule take its steps as on a GPU, where they cannot be timed one by one.

    .venv/bin/python tests/engine/bench_rank_step.py --policies tree-15,auto --requests 1,32
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from array import array
from pathlib import Path
from typing import Any

from overstory.workers.ddtree import POLICY_ENV
from overstory.workers.environment import cpu_engine_defaults, prepare_process
from overstory.workers.tiny.paths import resolve_model

ROWS = 16
WARM_STEPS = 12
DEADLINE_S = 60.0
IPC = ("tokenizer", "scheduler_input", "detokenizer", "rpc", "metrics")
SRT = "sglang.srt.managers"
OURS = "overstory.workers"

PARTS = {
    "gate before requests are pulled": f"{OURS}.gate.StepGate.before_pull",
    "gate after the broadcast": f"{OURS}.gate.StepGate.after_broadcast",
    "digest: a note": f"{OURS}.step_notes.StepNotes.note",
    "digest: a link": f"{OURS}.step_notes.StepNotes.close",
    "policy of the step": f"{OURS}.policy.chooser.StepChooser.next",
    "step launched": f"{OURS}.policy.chooser.StepChooser.ended",
    "walks to be counted": f"{OURS}.policy.chooser.StepChooser.outcome",
    "step kept": f"{OURS}.ddtree.step_record.PendingSteps.add",
    "acceptance read": f"{OURS}.ddtree.step_record.PendingSteps.read",
    "step counted": f"{OURS}.ddtree.step_record.PendingSteps.count",
    "walks counted": f"{OURS}.policy.chooser.StepOutcome.judge",
    "slots reserved": f"{OURS}.ddtree.draft_input.DDTreeDraftInput.prepare_for_decode",
    "end of a request looked for": f"{SRT}.schedule_batch.Req.update_finish_state",
    "SGLang: requests received": f"{SRT}.scheduler_components.request_receiver"
    ".SchedulerRequestReceiver.recv_requests",
    "SGLang: next batch": f"{SRT}.scheduler.Scheduler.get_next_batch_to_run",
    "SGLang: batch run": f"{SRT}.scheduler.Scheduler.run_batch",
    "SGLang: result taken in": f"{SRT}.scheduler.Scheduler.process_batch_result",
    "SGLang: tokens sent": f"{SRT}.scheduler_components.output_streamer"
    ".SchedulerOutputStreamer.stream_output",
}
"""Functions that are timed, with what they call."""

DRAIN = """
import os, sys, zmq
socket = zmq.Context().socket(zmq.PULL)
socket.bind(sys.argv[1])
parent = os.getppid()
while os.getppid() == parent:
    if socket.poll(1000):
        socket.recv()
"""


class Timed:
    """Nanoseconds of each call of the parts: of wall time, and of the thread's own CPU time."""

    def __init__(self) -> None:
        import pkgutil

        self.calls: dict[str, list[tuple[int, int]]] = {}
        for name, path in PARTS.items():
            owner, _, attribute = path.rpartition(".")
            self._wrap(pkgutil.resolve_name(owner), attribute, self.calls.setdefault(name, []))

    @staticmethod
    def _wrap(owner: Any, attribute: str, calls: list[tuple[int, int]]) -> None:
        function = getattr(owner, attribute)
        clock, own = time.perf_counter_ns, time.thread_time_ns

        def timed(*arguments: Any, **named: Any) -> Any:
            begun_own, begun = own(), clock()
            result = function(*arguments, **named)
            took = clock() - begun
            calls.append((took, own() - begun_own))
            return result

        setattr(owner, attribute, timed)

    def clear(self) -> None:
        """Forgets what was timed."""
        for calls in self.calls.values():
            calls.clear()


class Rank:
    """A rank 0 of one rank, under leases."""

    rows = ROWS
    """Most rows of a request's step."""

    tokens = 1400
    """Of a request."""

    slots = 32768

    parts = True
    """Whether the parts are timed, which takes time itself."""

    def __init__(self, policy: str, requests: int, lease_steps: int) -> None:
        from overstory.workers.rank import RankHost

        self.folder = tempfile.mkdtemp(prefix="rank-step-")
        self.host = RankHost(0, "cpu", 1, 30.0, self.folder)
        self.policy, self._lease_steps = policy, lease_steps
        self.exchanges: list[int] = []
        self._most, self._ready = requests, threading.Event()
        self._loop = threading.Thread(target=self._run, daemon=True)
        self._loop.start()
        while not self._ready.wait(0.2):
            assert self._loop.is_alive(), "the rank did not start"
        threading.Thread(target=self._grant, daemon=True).start()

    def _run(self) -> None:
        self.clock = time.pthread_getcpuclockid(threading.get_ident())
        self.host.preload()
        from sglang.srt.server_args import PortArgs, ServerArgs

        fields = cpu_engine_defaults() | {
            "model_path": resolve_model("overstory-tiny"),
            "speculative_algorithm": "DDTREE",
            "speculative_draft_model_path": resolve_model("overstory-tiny-drafter"),
            "speculative_num_draft_tokens": self.rows,
            "skip_tokenizer_init": True,
            "max_total_tokens": self.slots,
            "incremental_streaming_output": True,
            "max_running_requests": max(8, self._most),
            "log_level": "warning",
            "random_seed": 1,
        }
        arguments = ServerArgs(**fields)
        ports = PortArgs.init_new(arguments)
        names = {f"{name}_ipc_name": f"ipc://{self.folder}/{name}" for name in IPC}
        ports = dataclasses.replace(ports, **names)
        arguments = dataclasses.replace(arguments, dist_init_addr=f"127.0.0.1:{ports.nccl_port}")
        self.drain = subprocess.Popen([sys.executable, "-c", DRAIN, ports.tokenizer_ipc_name])
        self.host.start(arguments, ports)
        import zmq

        self._socket = zmq.Context().socket(zmq.PUSH)
        self._socket.bind(ports.scheduler_input_ipc_name)
        self.timed = Timed() if self.parts else None
        self._ready.set()
        self.host.run_loop()

    def _grant(self) -> None:
        """The controller's part: grants what is due, reads reports."""
        from overstory.orchestrator.lease import Lease

        epoch, seq, heard, wanted, granted = self.host.attach("bench"), 0, 0, True, ""
        while True:
            if wanted or granted != self.policy:
                seq, granted = seq + 1, self.policy
                lease = Lease(epoch, seq, self._lease_steps, granted, supersede=not wanted)
                self.host.grant(lease)
            begun = time.thread_time_ns()
            report = self.host.exchange(heard, self._lease_steps // 2, 0.5)
            self.exchanges.append(time.thread_time_ns() - begun)
            heard = max([heard, *(number for number, _ in report["digests"].links)])
            wanted = report["lease"]["wants_next"]

    @property
    def scheduler(self) -> Any:
        """SGLang's."""
        assert self.host._view is not None
        return self.host._view.raw

    def submit(self, number: int, temperature: float = 0.0) -> str:
        """A request that outlasts the measurement."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput, sock_send
        from sglang.srt.sampling.sampling_params import SamplingParams

        params = SamplingParams(
            temperature=temperature, max_new_tokens=self.tokens, ignore_eos=True
        )
        params.normalize(None)
        rid = uuid.uuid4().hex
        request = TokenizedGenerateReqInput(
            rid=rid,
            input_text="",
            input_ids=array("q", range(40 + number, 100 + number)),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=params,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=True,
        )
        sock_send(self._socket, request)
        return rid

    def abort(self, rids: list[str]) -> None:
        """Ends requests and waits until the rank is idle."""
        from sglang.srt.managers.io_struct import AbortReq, sock_send

        for rid in rids:
            sock_send(self._socket, AbortReq(rid=rid))
        wait_until(self.scheduler.is_fully_idle)

    def launched(self) -> int:
        """Batches so far."""
        return int(self.scheduler.forward_ct)


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "too slow"
        time.sleep(0.02)


def measure(rank: Rank, policy: str, requests: int, steps: int) -> None:
    """Prints a table of one policy and number of requests."""
    rank.policy = policy
    rids = [rank.submit(number) for number in range(requests)]
    wait_until(lambda: len(rank.scheduler.running_batch.reqs) == requests)
    begun = rank.launched() + WARM_STEPS
    wait_until(lambda: rank.launched() >= begun)
    rank.timed.clear()
    rank.exchanges.clear()
    pauses = gc.get_stats()[2]["collections"]
    begun, since = rank.launched(), time.perf_counter()
    wait_until(lambda: rank.launched() >= begun + steps)
    taken = rank.launched() - begun
    each_ms = (time.perf_counter() - since) / taken * 1e3
    print(f"\n{policy}, {requests} requests: {taken} steps of {each_ms:.1f} ms")
    heads = f"{'median us':>10s} {'us a step':>10s} {'CPU us':>10s}"
    print(f"{'part':34s} {'calls a step':>12s} {heads}")
    for name, calls in rank.timed.calls.items():
        kept = list(calls)
        if kept:
            median = statistics.median(wall for wall, _ in kept) / 1e3
            a_step, own = len(kept) / taken, sum(own for _, own in kept) / 1e3 / taken
            print(f"{name:34s} {a_step:12.2f} {median:10.1f} {median * a_step:10.1f} {own:10.1f}")
    if rank.exchanges:
        print(f"control call, CPU of its thread: {statistics.median(rank.exchanges) / 1e3:.0f} us")
    print(f"full collections: {gc.get_stats()[2]['collections'] - pauses}")
    rank.abort(rids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policies", default="tree-15", help="separated by commas")
    parser.add_argument("--requests", default="1,32", help="at a time, separated by commas")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--ahead", action="store_true", help="the automatic rule as on a GPU")
    parser.add_argument("--lease-steps", type=int, default=64)
    options = parser.parse_args()
    policies = options.policies.split(",")
    requests = [int(number) for number in options.requests.split(",")]
    os.environ["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY"] = "0"
    os.environ[POLICY_ENV] = "auto" if "auto" in policies else policies[0]
    prepare_process("cpu", 1)
    rank = Rank(policies[0], max(requests), options.lease_steps)
    rank.scheduler.draft_worker.chooser._host_waits &= not options.ahead
    for policy in policies:
        for number in requests:
            measure(rank, policy, number, options.steps if number < 8 else options.steps // 2)
    begun = time.perf_counter()
    gc.collect()
    print(
        f"\na full collection: {1e3 * (time.perf_counter() - begun):.1f} ms; "
        f"objects in its sight: {len(gc.get_objects())}"
    )
    print("threads:", ", ".join(thread.name for thread in threading.enumerate()))
    rank.drain.kill()
    for file in Path(rank.folder).iterdir():
        file.unlink(missing_ok=True)
    Path(rank.folder).rmdir()
    sys.stdout.flush()
    os._exit(0)  # nothing here is worth SGLang's slow shutdown


if __name__ == "__main__":
    main()
