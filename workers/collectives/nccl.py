"""Communicators between GPUs: NCCL through CuPy, on torch's streams.

`torch` must be imported before CuPy, so that both find the same libnccl: two of them in one process
break each other. CuPy offers no init with a limit and no way to leave one that hangs, so all ranks
are known to be there before it is called.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from overstory.workers.collectives.errors import (
    CollectiveError,
    CollectivesUnavailable,
    PeerLost,
    TransferTimeout,
)
from overstory.workers.collectives.meeting import Door, Line, Seat, meet

_POLL_S = (20e-6, 200e-6)
"""Shortest and longest pause between two looks at a transfer."""


class NcclCommunicator:
    """See `Communicator`. Operations run on the calling thread's current stream."""

    def __init__(self, line: Line, comm: Any, device: torch.device, transfer_s: float) -> None:
        self.name, self.rank, self.size = line.seat.name, line.seat.rank, line.seat.size
        self.device = device
        self._line, self._comm, self._transfer_s = line, comm, transfer_s

    @classmethod
    def connect(
        cls, seat: Seat, door: Door | bytes, device: torch.device, init_s: float, transfer_s: float
    ) -> NcclCommunicator:
        """See `overstory.workers.collectives.connect`."""
        library = load_nccl()
        if device.type != "cuda" or device.index is None:
            raise ValueError(f"nccl wants a CUDA device with its index, got {device}")

        def unique_id(_host: str) -> list[int] | None:
            return list(library.get_unique_id()) if seat.rank == 0 else None

        line = meet(seat, door, init_s, unique_id)
        try:
            comm = _start(library, line, device, init_s)
        except BaseException:
            line.close()
            raise
        return cls(line, comm, device, transfer_s)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """See `Communicator`."""
        address, count = self._bytes(tensor)
        self._call("send", address, count, _uint8(), to, self._stream())

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """See `Communicator`."""
        address, count = self._bytes(tensor)
        self._call("recv", address, count, _uint8(), source, self._stream())

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """See `Communicator`."""
        address, count = self._bytes(tensor)
        self._call("bcast", address, count, _uint8(), root, self._stream())

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """See `Communicator`."""
        whole = tensor.new_empty((self.size, *tensor.shape))
        address, count = self._bytes(tensor)
        target, _ = self._bytes(whole)
        self._call("allGather", address, target, count, _uint8(), self._stream())
        return list(whole)

    @property
    def lost(self) -> PeerLost | None:
        """See `Communicator`."""
        return self._line.lost

    def tell(self, word: Any, to: int) -> None:
        """See `Communicator`."""
        self._line.tell(word, to)

    def hear(self, timeout_s: float) -> tuple[int, Any]:
        """See `Communicator`."""
        return self._line.hear(timeout_s)

    def wait(self, timeout_s: float | None = None) -> None:
        """See `Communicator`; waits for this thread's current stream.

        A rank that is gone leaves a kernel that would spin for ever: it is aborted here.
        """
        limit_s = self._transfer_s if timeout_s is None else timeout_s
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self.device))
        begun, pause_s = time.monotonic(), _POLL_S[0]
        while not done.query():
            self._raise_if_lost()
            if time.monotonic() - begun > limit_s:
                self._abort()
                raise TransferTimeout(f"communicator {self.name}: not done in {limit_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S[1])

    def close(self) -> None:
        """See `Communicator`."""
        comm, self._comm = self._comm, None
        if comm is not None:
            # destroy() waits for what is under way, which may be with a rank that is gone.
            comm.abort()
        self._line.close()

    def _raise_if_lost(self) -> None:
        if self._line.lost is not None:
            self._abort()
            raise self._line.lost
        if self._comm is None:
            raise CollectiveError(f"communicator {self.name} is closed")
        try:
            self._comm.check_async_error()
        except Exception as error:
            self._abort()
            raise self._line.lost or CollectiveError(
                f"communicator {self.name}: nccl: {error}"
            ) from error

    def _abort(self) -> None:
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.abort()

    def _call(self, method: str, *arguments: Any) -> None:
        self._raise_if_lost()
        with torch.cuda.device(self.device):
            try:
                getattr(self._comm, method)(*arguments)
            except Exception as error:
                self._abort()
                raise CollectiveError(f"communicator {self.name}: {method}: {error}") from error

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def _bytes(self, tensor: torch.Tensor) -> tuple[int, int]:
        if not tensor.is_contiguous() or tensor.device != self.device:
            raise ValueError(
                f"wanted a contiguous tensor on {self.device}, got {tuple(tensor.shape)} with "
                f"strides {tensor.stride()} on {tensor.device}"
            )
        return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def load_nccl() -> Any:
    """CuPy's module of NCCL.

    Raises:
        CollectivesUnavailable: no GPU, no CuPy, CuPy without NCCL, or another NCCL than torch's.
    """
    if not torch.cuda.is_available():
        raise CollectivesUnavailable("NCCL wants a CUDA GPU; torch sees none")
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise CollectivesUnavailable(
            f"NCCL is reached through CuPy, which cannot be imported: {error}. Install "
            "cupy-cuda13x and nvidia-nccl-cu13"
        ) from error
    if not getattr(nccl, "available", True) or not hasattr(nccl, "NcclCommunicator"):
        raise CollectivesUnavailable("this CuPy was built without NCCL; install nvidia-nccl-cu13")
    loaded = loaded_libraries("libnccl.so")
    if len(loaded) > 1:
        raise CollectivesUnavailable(
            f"two NCCL libraries are loaded, {' and '.join(loaded)}: import torch before cupy, and "
            "leave one of them out of LD_LIBRARY_PATH"
        )
    return nccl


def loaded_libraries(name: str) -> list[str]:
    """Paths of the shared libraries of this process whose file name begins with `name`."""
    paths = set()
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.rstrip("\n").rpartition(" ")[2]
            if path.rpartition("/")[2].startswith(name):
                paths.add(path)
    return sorted(paths)


def _start(library: Any, line: Line, device: torch.device, init_s: float) -> Any:
    """NCCL's own init, in a thread: it cannot be told how long it may take. One that comes too late
    is given back by its thread."""
    outcome: list[Any] = []
    given_up = False
    deciding = threading.Lock()

    def init() -> None:
        try:
            torch.cuda.set_device(device)
            seat = line.seat
            comm = library.NcclCommunicator(seat.size, bytes(line.book[0]), seat.rank)
            _touch(library, comm, seat, device)
            with deciding:
                if not given_up:
                    outcome.append(comm)
                    return
            comm.abort()
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=init, name=f"nccl-init-{line.seat.name}", daemon=True)
    thread.start()
    deadline = time.monotonic() + init_s
    while thread.is_alive() and time.monotonic() < deadline and line.lost is None:
        thread.join(0.05)
    with deciding:
        given_up = not outcome
    if given_up:
        raise line.lost or CollectiveError(
            f"communicator {line.seat.name}: NCCL did not start in {init_s:g} s though all ranks "
            "came; NCCL_DEBUG=INFO tells more"
        )
    if isinstance(outcome[0], BaseException):
        raise CollectiveError(
            f"communicator {line.seat.name}: NCCL did not start: {outcome[0]}"
        ) from outcome[0]
    return outcome[0]


def _touch(library: Any, comm: Any, seat: Seat, device: torch.device) -> None:
    """A byte from each rank to each. NCCL connects two ranks at their first transfer, and holds its
    caller until both have come: no limit of a later transfer would count."""
    stream = torch.cuda.Stream(device)
    given = torch.zeros(seat.size, dtype=torch.uint8, device=device)
    stream.wait_stream(torch.cuda.current_stream(device))
    library.groupStart()
    for peer in range(seat.size):
        if peer != seat.rank:
            comm.send(given[seat.rank :].data_ptr(), 1, _uint8(), peer, stream.cuda_stream)
            comm.recv(given[peer:].data_ptr(), 1, _uint8(), peer, stream.cuda_stream)
    library.groupEnd()
    stream.synchronize()


def _uint8() -> int:
    from cupy.cuda import nccl

    return int(nccl.NCCL_UINT8)
