"""A real engine over rank actors, for tests: asked here, served by a loop in a thread."""

import asyncio
import os
import threading
import time
import uuid
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray
from leftovers import actors_of, port_is_free, wait_until

from overstory.orchestrator.launch import launch_engine
from overstory.orchestrator.lease import Command, Lease
from overstory.orchestrator.local_process import LocalProcess
from overstory.orchestrator.rank_group import CONTROL, RankPlan, call
from overstory.workers.commands import EXTENSIONS_VARIABLE
from overstory.workers.ddtree import POLICY_ENV, server_fields
from overstory.workers.environment import rank_environment
from overstory.workers.tiny.paths import resolve_model
from overstory.workers.tree_policy import TreePolicy

PROMPT = list(range(40, 72))
CALL_S = 30.0
REQUEST_S = 300.0
BLOCK_SIZE = 8


def pair() -> tuple[str, str]:
    """Folders of target and drafter: `OVERSTORY_TEST_PAIR`, or the built-in pair."""
    root = os.environ.get("OVERSTORY_TEST_PAIR")
    if root:
        return str(Path(root) / "target"), str(Path(root) / "drafter")
    return resolve_model("overstory-tiny"), resolve_model("overstory-tiny-drafter")


class Stream:
    """A request under way: what came so far and when."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.times: list[float] = []
        self.finish_reason: dict[str, Any] | None = None
        self.done: Future[None] = Future()
        self.task: Future[None] | None = None

    def result(self) -> list[int]:
        """All token ids, when it has ended; raises what ended it."""
        self.done.result(REQUEST_S)
        return self.ids

    def cancel(self) -> None:
        """Cancels the task that reads the stream."""
        assert self.task is not None
        self.task.cancel()

    def wait_for(self, tokens: int) -> None:
        """Waits until so many tokens came."""
        wait_until(lambda: len(self.ids) >= tokens or self.done.done(), REQUEST_S, "tokens")
        assert len(self.ids) >= tokens, f"ended with {len(self.ids)} tokens: {self.done}"


class LiveEngine:
    """Ranks, front half and a thread with its event loop. Close it: it proves that nothing is left.

    Args:
        tp_size: ranks.
        policy: tree policy to start with; also the largest.
        lease_timeout_s: of rank 0.
        fields: more ServerArgs.
    """

    def __init__(
        self,
        tp_size: int = 2,
        policy: str = "tree-7",
        lease_timeout_s: float = 8.0,
        unresponsive_s: float = 60.0,
        **fields: Any,
    ) -> None:
        target, drafter = pair()
        self.deployment = f"test-{uuid.uuid4().hex[:6]}"
        environment = {
            "PYTHONPATH": f"{Path(__file__).parent}:{rank_environment('cpu')['PYTHONPATH']}",
            EXTENSIONS_VARIABLE: "rank_faults:register",
            POLICY_ENV: policy,
        }
        plan = RankPlan(
            self.deployment,
            "r1",
            tp_size,
            cpus_per_rank=0.1,
            environment=environment,
            lease_timeout_s=lease_timeout_s,
            unresponsive_s=unresponsive_s,
        )
        speculation = server_fields(TreePolicy.parse(policy), BLOCK_SIZE, drafter)
        self.engine = launch_engine(
            plan, {"model_path": target, "max_total_tokens": 4096, **speculation, **fields}
        )
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.seq = 0
        self.epoch = 0

    # ---------------------------------------------------------------- requests

    def stream(self, tokens: int, prompt: list[int] | None = None) -> Stream:
        """Starts a greedy request of exactly `tokens` new tokens."""
        stream = Stream()
        follow = self._follow(stream, tokens, prompt or PROMPT)
        stream.task = asyncio.run_coroutine_threadsafe(follow, self.loop)
        return stream

    def generate(self, tokens: int, prompt: list[int] | None = None) -> list[int]:
        """Token ids of a greedy request of exactly `tokens` new tokens."""
        return self.stream(tokens, prompt).result()

    async def _follow(self, stream: Stream, tokens: int, prompt: list[int]) -> None:
        params = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        try:
            async for step in self.engine.generate_ids(prompt, params):
                stream.ids += step["token_ids"]
                stream.times.append(time.monotonic())
                stream.finish_reason = step["finish_reason"]
            stream.done.set_result(None)
        except BaseException as error:
            stream.done.set_exception(error)

    # ---------------------------------------------------------------- ranks

    def ask(self, rank: int, method: str, *arguments: Any) -> Any:
        """Calls a control method of a rank."""
        return ray.get(
            call(self.engine.group.actors[rank], CONTROL, method, *arguments), timeout=CALL_S
        )

    def reports(self, after: int = 0) -> list[dict[str, Any]]:
        """Reports of all ranks."""
        return [self.ask(rank, "report", after) for rank in range(self.engine.group.plan.tp_size)]

    def attach(self) -> None:
        """Takes the part of the controller."""
        self.epoch, self.seq = self.ask(0, "attach"), 0

    def grant(self, steps: int, policy: str = "tree-7", *commands: Command, **more: Any) -> None:
        """Grants the next lease by hand."""
        self.seq += 1
        self.ask(0, "grant", Lease(self.epoch, self.seq, steps, policy, commands, **more))

    def detach(self) -> None:
        """Lets go: the engine runs freely."""
        self.ask(0, "detach", self.epoch)

    def process(self, rank: int) -> LocalProcess:
        """The rank's process."""
        identity = self.engine.group.identities[rank]
        return LocalProcess(identity.host, identity.pid, identity.started)

    # ---------------------------------------------------------------- end

    def close(self) -> None:
        """Ends it all and checks that nothing is left: actors, processes, port, IPC files."""
        ranks = [self.process(rank) for rank in range(len(self.engine.group.identities))]
        port = self.engine.port_args.nccl_port
        ipc = self.engine.port_args.tokenizer_ipc_name.removeprefix("ipc://")
        segments = [p for r in ranks for p in Path("/dev/shm").glob(f"sgl_shm_*_{r.pid}_*")]
        assert not segments, "shared memory has names that a killed rank would leave behind"
        self.engine.shutdown()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()
        for rank, process in enumerate(ranks):
            assert process.wait_gone(10), f"the process of rank {rank} is left"
        wait_until(lambda: not actors_of(self.deployment), 10, "actor names to go")
        wait_until(lambda: port_is_free(port), 10, f"port {port} to be free")
        assert not Path(ipc).parent.exists(), "IPC files are left"
