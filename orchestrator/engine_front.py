"""SGLang's front half over rank actors: token ids in, token ids out.

Importing this module imports SGLang (seconds): launch the rank actors first, so that they import
it meanwhile; `launch_engine` in `overstory.orchestrator.launch` does both in order.
`prepare_process` must have run in this process.

No tokenizer and no detokenizer: text belongs to the gateway. Stop token ids end a request in the
engine; stop strings need text, so they too are the gateway's.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

import ray
from sglang.srt.entrypoints.engine import Engine, SchedulerInitResult, init_tokenizer_manager
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.load_snapshot import ShmLoadSnapshotReader
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import PortArgs, ServerArgs
from sglang.srt.utils import configure_logger

from overstory.orchestrator.engine_errors import (
    EngineBusy,
    EngineDead,
    RankDeath,
    RequestRefused,
)
from overstory.orchestrator.front_files import make_front_folder, sweep_dead
from overstory.orchestrator.rank_group import Progress, RankGroup

logger = logging.getLogger(__name__)

_IPC_FIELDS = (
    "tokenizer_ipc_name",
    "scheduler_input_ipc_name",
    "detokenizer_ipc_name",
    "rpc_ipc_name",
    "metrics_ipc_name",
)


class _UnknownAfterAbort(logging.Filter):
    """Drops SGLang's error line about output of a request that was just aborted: it is expected."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to keep the record."""
        return "Received output for rid=" not in record.getMessage()


logging.getLogger(TokenizerManager.__module__).addFilter(_UnknownAfterAbort())


class FrontManager(TokenizerManager):
    """SGLang's TokenizerManager without a grip on the process it lives in.

    SGLang's own takes over SIGTERM and SIGQUIT and, on an error in its loop, kills the process and
    all its children: in a Serve replica that loses the cause, in a driver it takes Ray along.
    """

    event_loop: asyncio.AbstractEventLoop | None
    on_loop_failure: Any = None

    def auto_create_handle_loop(self) -> None:
        """Starts the loop that takes the engine's outputs, once, on the running event loop."""
        if self.event_loop is not None:
            return
        loop = asyncio.get_running_loop()
        self.event_loop = loop
        task = loop.create_task(self.handle_loop())
        task.add_done_callback(self._loop_done)
        self.asyncio_tasks.add(task)

    def _loop_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and self.on_loop_failure is not None:
            self.on_loop_failure(task.exception())


class OverstoryEngine(Engine):
    """SGLang's Engine whose schedulers are Ray actors. Not usable after `EngineDead`.

    Args:
        group: launched ranks.
        fields: ServerArgs by name. `skip_tokenizer_init`, incremental streaming and `tp_size` are
        set here.
        on_progress: told what each rank is doing while they start.

    Raises:
        EngineDead: a rank died or failed while starting.
        ValueError: SGLang refuses the fields.
    """

    def __init__(
        self, group: RankGroup, fields: Mapping[str, Any], on_progress: Progress | None = None
    ) -> None:
        load_plugins()
        self._group = group
        self._on_progress = on_progress
        self._death: RankDeath | None = None
        self.on_death: Callable[[RankDeath], None] | None = None
        """Told once, from whichever thread notices, when the engine is gone."""
        sweep_dead()
        self._ipc_folder = make_front_folder()
        self._closed = threading.Lock()
        try:
            super().__init__(server_args=ServerArgs(**_fixed_fields(fields, group)))
        except BaseException:
            self.shutdown()
            raise

    # ------------------------------------------------------------------ requests

    async def generate_ids(
        self,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        rid: str | None = None,
        return_logprob: bool = False,
        top_logprobs_num: int = 0,
    ) -> AsyncIterator[dict[str, Any]]:
        """Generates; yields one dict for each step (or several steps, if the caller is slower).

        Closing the iterator, or cancelling the task that awaits it, aborts the request in the
        engine.

        Args:
            input_ids: prompt.
            sampling_params: SGLang's, by name (`max_new_tokens`, `temperature`, `sampling_seed`,
            ...).
            rid: request id, unique among running requests; drawn if not given.
            return_logprob: also give logprobs of the new tokens.
            top_logprobs_num: how many alternatives at each position.

        Yields:
            `token_ids` (new ones only), `logprobs` (list of (logprob, token id, None) or None),
            `top_logprobs` (likewise), `finish_reason` (None, or SGLang's dict with `type`), `meta`
            (SGLang's).

        Raises:
            RequestRefused: the engine does not take this request.
            EngineBusy: it cannot take it now.
            EngineDead: a rank died; the cause is in it.
        """
        self._raise_if_dead()
        request = GenerateReqInput(
            input_ids=list(input_ids),
            sampling_params=dict(sampling_params),
            rid=rid,
            stream=True,
            return_logprob=return_logprob,
            top_logprobs_num=top_logprobs_num,
            logprob_start_len=-1,
        )
        try:
            stream = self.tokenizer_manager.generate_request(request, None)
            async with contextlib.aclosing(stream) as chunks:
                async for chunk in chunks:
                    yield self._as_step(chunk)
        except ValueError as error:
            if isinstance(error, RequestRefused):
                raise
            raise RequestRefused(str(error)) from error

    def abort(self, rid: str) -> None:
        """Aborts a request: its iterator ends with finish reason "abort". No-op for unknown ids."""
        self.tokenizer_manager.abort_request(rid)

    def running(self) -> int:
        """Requests accepted and not finished."""
        return len(self.tokenizer_manager.rid_to_state)

    # ------------------------------------------------------------------ life

    @property
    def death(self) -> RankDeath | None:
        """Why the engine is gone, or None while it lives."""
        return self._death

    @property
    def group(self) -> RankGroup:
        """The rank actors."""
        return self._group

    @property
    def scheduler_info(self) -> Mapping[str, Any]:
        """What rank 0's scheduler told of itself at its start, by SGLang's names:
        `max_req_input_len`, `max_total_num_tokens`, ... (`Scheduler.get_init_info`)."""
        info: Mapping[str, Any] = self._scheduler_init_result.scheduler_infos[0]
        return info

    def shutdown(self) -> None:
        """Ends the ranks and removes the IPC files. Idempotent; kills nothing but the ranks."""
        if not self._closed.acquire(blocking=False):
            return
        self._group.end()
        rpc = getattr(self, "send_to_rpc", None)
        if rpc is not None:
            rpc.close(linger=0)
        manager = getattr(self, "tokenizer_manager", None)
        if manager is not None:
            _close_manager(manager)
        shutil.rmtree(self._ipc_folder, ignore_errors=True)

    # ------------------------------------------------------------------ inside

    def _launch_subprocesses(
        self, server_args: ServerArgs, **_functions: Any
    ) -> tuple[Any, Any, PortArgs, SchedulerInitResult, None, list[Any]]:
        """In place of SGLang's: no detokenizer, no signal handlers, no process watchdog."""
        configure_logger(server_args)
        server_args.check_server_args()
        port_args = self._port_args(server_args)
        self._group.await_imports(self._on_progress)
        self._group.check_beside()
        host = "127.0.0.1" if self._group.one_node() else ray.util.get_node_ip_address()
        host = f"[{host}]" if ":" in host else host
        rank_args = dataclasses.replace(server_args, dist_init_addr=f"{host}:{port_args.nccl_port}")
        manager, templates = self._front(server_args, port_args)
        try:
            infos = self._group.start(rank_args, port_args, self._on_progress)
        finally:  # Rank 0 may have made it before another rank failed.
            _take_load_file_off(manager)
        manager.max_req_input_len = infos[0]["max_req_input_len"]
        manager.on_loop_failure = self._front_failed
        self.tokenizer_manager = manager
        self._group.run(self._ranks_lost)
        return manager, templates, port_args, SchedulerInitResult(scheduler_infos=infos), None, []

    def _port_args(self, server_args: ServerArgs) -> PortArgs:
        """SGLang's, with IPC files in a folder of this engine, so that they go with it."""
        port_args = PortArgs.init_new(server_args)
        for name in _IPC_FIELDS:
            Path(getattr(port_args, name).removeprefix("ipc://")).unlink(missing_ok=True)
        return dataclasses.replace(
            port_args,
            instance_id=self._ipc_folder.name,
            **{name: f"ipc://{self._ipc_folder}/{name}" for name in _IPC_FIELDS},
        )

    @staticmethod
    def _front(server_args: ServerArgs, port_args: PortArgs) -> tuple[FrontManager, Any]:
        manager, templates = init_tokenizer_manager(server_args, port_args, FrontManager)
        return manager, templates

    def _as_step(self, chunk: Mapping[str, Any]) -> dict[str, Any]:
        self._group.moved()
        meta = chunk["meta_info"]
        reason = meta.get("finish_reason")
        if reason and reason["type"] == "abort":
            self._raise_for(reason)
        # An abort echoed by the scheduler repeats the last token; only a batch output, which also
        # counts the prompt, brings new ones.
        fresh = chunk["output_ids"] if "prompt_tokens" in meta else []
        return {
            "token_ids": list(fresh),
            "logprobs": meta.get("output_token_logprobs"),
            "top_logprobs": meta.get("output_top_logprobs"),
            "finish_reason": reason,
            "meta": meta,
        }

    def _raise_for(self, reason: Mapping[str, Any]) -> None:
        self._raise_if_dead()
        status = reason.get("status_code")
        message = str(reason.get("message", "aborted by the engine"))
        if status == HTTPStatus.BAD_REQUEST:
            raise RequestRefused(message)
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            raise EngineBusy(message)

    def _raise_if_dead(self) -> None:
        if self._death is not None:
            raise EngineDead(self._death)

    def _ranks_lost(self, death: RankDeath) -> None:
        """Called once by the watcher's thread: fails what runs and what comes."""
        self._death = death
        logger.error("engine lost: %s", death)
        loop = self.tokenizer_manager.event_loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # The loop may be closed already.
                loop.call_soon_threadsafe(self._fail_requests)
        if self.on_death is not None:
            self.on_death(death)

    def _fail_requests(self) -> None:
        for rid, state in list(self.tokenizer_manager.rid_to_state.items()):
            state.finished = True
            reason = {"type": "abort", "message": "a rank died"}
            state.out_list.append(
                {"output_ids": [], "meta_info": {"id": rid, "finish_reason": reason}}
            )
            state.event.set()

    def _front_failed(self, error: BaseException | None) -> None:
        """The loop that takes outputs ended: without it the engine is as good as dead."""
        death = RankDeath(rank=0, cause=f"the front half failed: {error!r}", phase="front half")
        self._death = self._death or death
        self._fail_requests()
        if self.on_death is not None:
            self.on_death(self._death)
        self._group.end()


def _fixed_fields(fields: Mapping[str, Any], group: RankGroup) -> dict[str, Any]:
    """`fields` with what the front half relies on; refuses values that contradict it."""
    watchdog_s = fields.get("watchdog_timeout", ServerArgs.watchdog_timeout)
    if group.plan.lease_timeout_s >= watchdog_s:
        raise ValueError(
            f"control.lease_timeout_s ({group.plan.lease_timeout_s} s) must be below "
            f"engine.watchdog_timeout ({watchdog_s} s): a rank that waits for a late lease would "
            "count as standing still"
        )
    fixed = {
        "skip_tokenizer_init": True,
        "incremental_streaming_output": True,
        "tp_size": group.plan.tp_size,
        "stream_interval": 1,
    }
    for name, value in fixed.items():
        if name in fields and fields[name] != value:
            raise ValueError(
                f"engine.{name} must be {value!r}: Overstory sets it, got {fields[name]!r}; "
                "remove it"
            )
    return {"log_level": "warning", **fields, **fixed}


def _take_load_file_off(manager: FrontManager) -> None:
    """Takes the name off the file in /dev/shm through which rank 0 tells its load, which SGLang
    never does: mapped on both sides now, it lives as long as one of them. Over ZMQ it has none."""
    reader = manager.load_snapshot_reader
    if isinstance(reader, ShmLoadSnapshotReader):
        reader.read_all()  # Maps it.
        Path(reader.path).unlink(missing_ok=True)


def _close_manager(manager: FrontManager) -> None:
    """Closes SGLang's sockets. Their loop may run in another thread, or be closed."""
    loop = manager.event_loop
    if loop is not None and loop.is_running():
        for task in manager.asyncio_tasks:
            loop.call_soon_threadsafe(task.cancel)
        loop.call_soon_threadsafe(manager.recv_from_detokenizer.close, 0)
    else:
        manager.recv_from_detokenizer.close(0)
    manager.send_to_scheduler.close(0)
