"""A real SGLang scheduler of TP 1 inside the test process, stepped by hand.

SGLang's own event loop runs in a thread and stops at `recv_requests`, where the harness hands it
requests and lets one iteration pass: nothing of the loop is copied here. Import this module only
after `prepare_process`.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import uuid
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from overstory.workers.environment import cpu_engine_defaults, prepare_process
from overstory.workers.scheduler_view import SglangScheduler, already_processed

STEP_DEADLINE_S = 120.0

# Leaks end the loop with an exception. Level 2 checks after every busy iteration as well.
os.environ.setdefault("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "2")
os.environ.setdefault("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", "1")


@dataclasses.dataclass
class Output:
    """What the scheduler has sent of one request."""

    ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: dict[str, Any] | None = None
    cached_tokens: int = 0
    refused: str | None = None
    logprobs: list[float] = dataclasses.field(default_factory=list)
    top_logprobs: list[dict[int, float]] = dataclasses.field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.finish_reason is not None or self.refused is not None


class _Gate:
    """Stands for the scheduler's request receiver: one call of `recv_requests` per iteration."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.pending: list[Any] = []
        self.allowed = 0
        self.waiting = False
        self.ended: BaseException | None = None
        self.closing = False
        self.act: Callable[[], None] | None = None

    def recv_requests(self) -> list[Any]:
        with self.condition:
            self.waiting = True
            self.condition.notify_all()
            while True:
                self.condition.wait_for(lambda: self.allowed > 0 or self.closing or self.act)
                if self.act is None:
                    break
                act, self.act = self.act, None
                act()
                self.condition.notify_all()
            if self.closing:
                raise SystemExit
            self.allowed -= 1
            self.waiting = False
            taken, self.pending = self.pending, []
            return taken

    def wait_idle(self) -> None:
        """Waits until the loop stands at the gate; raises what ended it."""
        with self.condition:
            arrived = self.condition.wait_for(
                lambda: (self.waiting and self.allowed == 0) or self.ended is not None,
                STEP_DEADLINE_S,
            )
        if self.ended is not None:
            raise RuntimeError("the scheduler's event loop ended") from self.ended
        assert arrived, f"no iteration ended within {STEP_DEADLINE_S} s"


class _Collector:
    """Stands for the socket to the detokenizer (and to the tokenizer, for refusals)."""

    def __init__(self, outputs: dict[str, Output]):
        self.outputs = outputs

    def send_output(self, message: Any, request: Any = None) -> None:
        if type(message).__name__ == "AbortReq":
            self.outputs[message.rid].refused = str(message.finished_reason or "aborted")
            return
        if not hasattr(message, "output_ids"):
            return
        for i, rid in enumerate(message.rids):
            output = self.outputs[rid]
            output.ids += list(message.output_ids[i])
            output.finish_reason = message.finished_reasons[i]
            output.cached_tokens = message.cached_tokens[i]
            self._keep_logprobs(message, i, output)

    @staticmethod
    def _keep_logprobs(message: Any, i: int, output: Output) -> None:
        if not message.output_token_logprobs_val:
            return
        output.logprobs += message.output_token_logprobs_val[i]
        for tokens, values in zip(
            message.output_top_logprobs_idx[i], message.output_top_logprobs_val[i], strict=True
        ):
            output.top_logprobs.append(dict(zip(tokens, values, strict=True)))


class EngineHarness:
    """One scheduler. Close it before the next is made: SGLang keeps its state in globals."""

    #: Where the model runs, and whether SGLang runs it with our plugin.
    device = "cpu"
    with_plugin = True
    #: GPU of rank 0; the others' follow.
    first_gpu = 0

    def __init__(self, model_path: str, tp_rank: int = 0, **server_args: Any):
        prepare_process(self.device)
        if self.with_plugin:
            from sglang.srt.plugins import load_plugins

            from overstory.workers.seam.plugin import verify_installed

            load_plugins()
            verify_installed()
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.runtime_context import publish
        from sglang.srt.server_args import PortArgs, ServerArgs

        fields = (cpu_engine_defaults() if self.device == "cpu" else {}) | {
            "model_path": model_path,
            "skip_tokenizer_init": True,
            "log_level": "warning",
            "max_total_tokens": 4096,
            "max_running_requests": 8,
        }
        self.server_args = ServerArgs(**(fields | server_args))
        publish(self.server_args, role="scheduler")
        ports = PortArgs.init_new(self.server_args)
        self._gpu = self.gpu_of(tp_rank) if self.device == "cuda" else 0
        self.scheduler = Scheduler(self.server_args, ports, self._gpu, tp_rank, 0, 0, 0, 0, None)
        if writer := self.scheduler.load_snapshot_writer:
            # Nobody reads its file in /dev/shm, and SGLang would leave it there.
            Path(writer.path).unlink(missing_ok=True)
        self.outputs: dict[str, Output] = {}
        self._gate = _Gate()
        self._view = SglangScheduler(self.scheduler)
        self._wire()
        self._thread = threading.Thread(target=self._loop, name="event-loop", daemon=True)
        self._thread.start()
        self._gate.wait_idle()

    def gpu_of(self, tp_rank: int) -> int:
        """Number of the GPU of a rank."""
        return self.first_gpu + tp_rank

    def submit(
        self,
        prompt: Sequence[int],
        sampling_params: Mapping[str, Any] | None = None,
        rid: str | None = None,
        **fields: Any,
    ) -> str:
        """Queues one request for the next iteration; returns its id."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        params = SamplingParams(**(sampling_params or {}))
        params.normalize(None)
        params.verify(self.scheduler.model_config.vocab_size)
        rid = rid or uuid.uuid4().hex
        request = TokenizedGenerateReqInput(
            rid=rid,
            input_text="",
            input_ids=array("q", prompt),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=params,
            return_logprob=fields.pop("return_logprob", False),
            logprob_start_len=-1,
            top_logprobs_num=fields.pop("top_logprobs_num", 0),
            token_ids_logprob=None,
            stream=True,
            **fields,
        )
        self.outputs[rid] = Output()
        self._gate.pending.append(request)
        return rid

    def abort(self, rid: str) -> None:
        """Queues the abort of a request for the next iteration."""
        from sglang.srt.managers.io_struct import AbortReq

        self._gate.pending.append(AbortReq(rid=rid))

    def step(self, iterations: int = 1) -> None:
        """Lets the event loop pass, and waits until it stands at the gate again."""
        for _ in range(iterations):
            with self._gate.condition:
                self._gate.allowed += 1
                self._gate.condition.notify_all()
            self._gate.wait_idle()

    def step_freely(self, iterations: int) -> None:
        """As `step`, without a stop between."""
        with self._gate.condition:
            self._gate.allowed += iterations
            self._gate.condition.notify_all()
        self._gate.wait_idle()

    def at_boundary(self, act: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Drains, then runs `act(scheduler, *arguments)`, where a boundary command would.

        In the loop's thread, between two iterations.

        Args:
            act: a function of a module that every rank can import.
            arguments: plain values.

        Returns:
            its result on each rank; raises what it raised.
        """
        results: list[Any] = []

        def run() -> None:
            try:
                self._view.drain()
                results.append(act(self.scheduler, *arguments))
            except BaseException as error:
                results.append(error)

        with self._gate.condition:
            self._gate.act = run
            self._gate.condition.notify_all()
            done = self._gate.condition.wait_for(lambda: results, STEP_DEADLINE_S)
        assert done, f"{act.__name__} did not end within {STEP_DEADLINE_S} s"
        if isinstance(results[0], BaseException):
            raise results[0]
        return results

    def run(self, rids: Sequence[str] | None = None, max_steps: int = 5000) -> None:
        """Steps until the requests (default: all) are done, then to an idle scheduler."""
        waited = list(self.outputs) if rids is None else list(rids)
        for _ in range(max_steps):
            if all(self.outputs[rid].done for rid in waited):
                break
            self.step()
        else:
            left = [rid for rid in waited if not self.outputs[rid].done]
            raise AssertionError(f"not done after {max_steps} steps: {left}")
        self.step(3)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    ) -> list[list[int]]:
        """New token ids of each prompt; all prompts are submitted at once."""
        params = (
            [sampling_params] * len(prompts)
            if sampling_params is None or isinstance(sampling_params, Mapping)
            else list(sampling_params)
        )
        rids = [self.submit(p, s) for p, s in zip(prompts, params, strict=True)]
        self.run(rids)
        return [self.outputs[rid].ids for rid in rids]

    def flush_cache(self) -> None:
        """Empties the prefix cache; the scheduler must be idle."""
        assert self.scheduler.flush_cache(), "flush_cache was refused: the scheduler is not idle"

    def free_slots(self) -> int:
        """KV slots neither held by a request nor by the prefix cache."""
        return self.scheduler.token_to_kv_pool_allocator.available_size()

    def cached_slots(self) -> int:
        """KV slots that the prefix cache could give back."""
        return self.scheduler.tree_cache.evictable_size()

    def assert_no_leak(self) -> None:
        """All KV slots and request rows are accounted for in an idle scheduler."""
        self.step()
        total = self.scheduler.max_total_num_tokens
        held = total - self.free_slots() - self.cached_slots()
        assert held == 0, f"{held} of {total} KV slots are held though nothing runs"
        pool = self.scheduler.req_to_token_pool
        assert pool.available_size() == pool.size, "request rows are held though nothing runs"

    def alive(self) -> bool:
        """Whether the event loop still runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Ends the loop and takes SGLang's process-wide groups down."""
        with self._gate.condition:
            self._gate.closing = True
            self._gate.condition.notify_all()
        self._thread.join(STEP_DEADLINE_S)
        from sglang.srt.distributed.parallel_state import cleanup_dist_env_and_memory
        from sglang.srt.runtime_context import RuntimeContext, get_context

        del self.scheduler, self._view
        cleanup_dist_env_and_memory()
        context = get_context()  # published once per process, so make it as new
        RuntimeContext.__init__(context, context.parallel)

    def _wire(self) -> None:
        collector = _Collector(self.outputs)
        # Unsent messages would keep the process from ending: nobody reads these sockets.
        channels = self.scheduler.ipc_channels
        for field in dataclasses.fields(channels):
            channel = getattr(channels, field.name)
            socket = getattr(channel, "socket", channel)
            if hasattr(socket, "linger"):
                socket.linger = 0
        self.scheduler.request_receiver = self._gate
        # As in a rank: what a drain has taken in comes again in its turn.
        process = self.scheduler.process_batch_result
        self.scheduler.process_batch_result = lambda batch, result: (
            None if already_processed(result) else process(batch, result)
        )
        self.scheduler.output_streamer.send_to_detokenizer = collector
        self.scheduler.ipc_channels = _replace_senders(self.scheduler.ipc_channels, collector)

    def _loop(self) -> None:
        try:
            if self.device == "cuda":
                import torch

                torch.cuda.set_device(self._gpu)  # else this thread's is GPU 0
            self.scheduler.run_event_loop()
        except SystemExit:
            pass
        except BaseException as error:
            with self._gate.condition:
                self._gate.ended = error
                self._gate.condition.notify_all()


def _replace_senders(channels: Any, collector: _Collector) -> Any:
    """SGLang's channels with both outgoing sockets replaced."""
    return dataclasses.replace(channels, send_to_tokenizer=collector, send_to_detokenizer=collector)
