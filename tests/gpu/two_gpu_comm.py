"""Communicators and transfers between two GPUs of one host: right, fast, and over when a peer dies.

    two_gpu_comm.py OUT SECONDS          all
    two_gpu_comm.py kv OUT SECONDS       rates alone

Needs torch and CuPy, neither SGLang nor Ray. Writes OUT/comm.json after each part, and each rank
OUT/comm_rank_N.json after each rate; says on stdout what it found. Two processes a part, each with
one GPU. TWO_GPU_TOY=1 rehearses the rates on a CPU, over TCP.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TOY = os.environ.get("TWO_GPU_TOY") == "1"
KIND: Any = "tcp" if TOY else "nccl"
PLACE = "cpu" if TOY else "cuda"
MIB = 1 << (12 if TOY else 20)
GIB = 1024 * MIB
LAYERS, ROW = 61, 576
"""KV of Kimi-K2 and its kin: a row of 576 bf16 in each of 61 layers, 70 KB a token."""
FOLDER = "OVERSTORY_COMM_OUT"

_SPAWN = multiprocessing.get_context("spawn")
Act = Callable[..., Any]


def device_of(index: int) -> Any:
    import torch

    if TOY:
        torch.set_num_threads(1)
        return torch.device("cpu")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def settle() -> None:
    """Until the device has done all."""
    import torch

    if not TOY:
        torch.cuda.synchronize()


def joined(seat: tuple[str, int], way: Any, index: int, **limits: float) -> Any:
    from overstory.workers.collectives import Seat, connect

    return connect(KIND, Seat(seat[0], seat[1], 2), way, device_of(index), **limits)


# ------------------------------------------------------------------ parts, run on each rank


def exchange(comm: Any) -> dict[str, Any]:
    """Every operation carries what it was given."""
    import torch

    mine = torch.full((1000,), float(comm.rank + 1), dtype=torch.bfloat16, device=comm.device)
    other = torch.empty_like(mine)
    peer = 1 - comm.rank
    if comm.rank == 0:
        comm.send(mine, peer)
        comm.receive(other, peer)
    else:
        comm.receive(other, peer)
        comm.send(mine, peer)
    shared = mine.clone()
    comm.broadcast(shared, 0)
    parts = comm.all_gather(mine)
    comm.wait()
    return {
        "other": float(other.mean()) == peer + 1,
        "shared": float(shared.mean()) == 1.0,
        "parts": [float(part.mean()) for part in parts] == [1.0, 2.0],
    }


def plain_copy(comm: Any) -> dict[str, float]:
    """GB/s of one large NCCL send after another: what the link gives."""
    import torch

    piece = torch.empty(GIB, dtype=torch.uint8, device=comm.device)
    rates = []
    for _ in range(6):
        settle()
        begun = time.perf_counter()
        for _ in range(8):
            (comm.send if comm.rank == 0 else comm.receive)(piece, 1 - comm.rank)
        comm.wait()
        rates.append(8 * GIB / (time.perf_counter() - begun) / 1e9)
    return {"gb_s": sorted(rates)[len(rates) // 2], "best_gb_s": max(rates)}


def carry(
    comm: Any,
    send: Callable[[int], Any],
    receive: Callable[[int], Any],
    sizes: tuple[int, ...] = (256, 512),
) -> dict[str, Any]:
    """GB/s through a conveyor, by the size of its pieces."""

    from overstory.workers.handoff.pieces import Conveyor

    rates, alone = {}, {}
    for mib in sizes:
        conveyor = Conveyor(comm, mib * MIB)
        seen = []
        for _ in range(4):
            settle()
            if comm.rank == 0:
                done = conveyor.send(send(conveyor.piece_bytes), 1)
            else:
                done = conveyor.receive(receive(conveyor.piece_bytes), 0)
            seen.append(done.bytes / done.seconds / 1e9)
        rates[f"{mib} MiB"] = sorted(seen)[len(seen) // 2]
        if comm.rank == 0:
            alone[f"{mib} MiB"] = filling(conveyor, send(conveyor.piece_bytes))
    return {"bytes": done.bytes, "gb_s": rates, "filling_gb_s": alone}


def filling(conveyor: Any, pieces: Any) -> dict[str, float]:
    """GB/s of gathering and checksums alone, with nothing sent; and of the host's part of it."""
    import torch

    staging = torch.empty(conveyor.piece_bytes + 16, dtype=torch.uint8, device=PLACE)
    settle()
    begun, total = time.perf_counter(), 0
    for piece in pieces:
        piece.move(staging[: piece.size])
        conveyor._seal(staging, piece.size)
        total += piece.size
    launched = time.perf_counter()
    settle()
    return {
        "gb_s": total / (time.perf_counter() - begun) / 1e9,
        "host_gb_s": total / (launched - begun) / 1e9,
    }


def kv_rows(comm: Any) -> dict[str, Any]:
    """KV of 100k tokens, in scattered slots and in one run, and whether it is what was sent."""
    import torch

    from overstory.kernels import ops
    from overstory.workers.handoff.rows import RowTable

    slots, count = (1300, 1000) if TOY else (130_000, 100_000)
    draw = torch.Generator(device=comm.device).manual_seed(5)
    buffers = [
        torch.zeros(slots, 1, ROW, dtype=torch.bfloat16, device=comm.device) for _ in range(LAYERS)
    ]
    for number, buffer in enumerate(buffers):
        if comm.rank == 0:
            buffer.view(torch.int16).random_(generator=draw)
            buffer.view(torch.int16)[0, 0, 0] = number
    table = RowTable(buffers)
    result: dict[str, Any] = {
        "row_bytes": table.row_bytes,
        "kernel": ops.prepare(comm.device),
    }
    order = torch.randperm(slots, generator=torch.Generator().manual_seed(6))[:count]
    for name, given, sizes in (
        ("scattered", order, (64, 128, 256, 512)),
        ("one run", torch.arange(count), (256, 512)),
    ):
        mine = given.to(comm.device)
        result[name] = carry(
            comm,
            lambda size, at=mine: table.gather(at, size),
            lambda size, at=mine: table.scatter(at, size),
            sizes,
        )
        result[name]["digest"] = [
            int(buffer.view(torch.int16).view(slots, ROW)[mine].long().sum()) for buffer in buffers
        ]
    return result


def weights(comm: Any) -> dict[str, Any]:
    """12 GiB of weights in large and small tensors."""
    import torch

    from overstory.workers.handoff.weights import WeightTable

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = torch.nn.Parameter(
                torch.empty(384 * MIB, dtype=torch.uint8, device=comm.device), requires_grad=False
            )
            self.small = torch.nn.ParameterList(
                torch.nn.Parameter(torch.empty(7168 + n, device=comm.device)) for n in range(20)
            )
            self.absorbed = torch.empty(64, 512, 128, device=comm.device).transpose(1, 2)

    model = torch.nn.ModuleList(Layer() for _ in range(32))
    table = WeightTable(model)
    if comm.rank == 0:
        for memory in table._memory:
            memory.random_()
    result = carry(comm, table.gather, table.scatter)
    result["digest"] = sum(int(memory.long().sum()) for memory in table._memory[:40])
    result["layout"] = table.layout
    return result


def small_words(comm: Any) -> dict[str, float]:
    """Digest comparison: 16 bytes from every rank, as often as it can be had."""
    import torch

    digest = torch.zeros(2, dtype=torch.int64, device=comm.device)
    for _ in range(20):
        comm.all_gather(digest)
    comm.wait()
    begun = time.perf_counter()
    for _ in range(200):
        comm.all_gather(digest)
        comm.wait()
    return {"all_gather_us": (time.perf_counter() - begun) / 200 * 1e6}


def die(comm: Any) -> dict[str, Any]:
    """Rank 1 is killed while rank 0 sends to it: how soon that shows, and what still works."""
    import torch

    from overstory.workers.collectives import PeerLost

    piece = torch.empty(GIB, dtype=torch.uint8, device=comm.device)
    if comm.rank == 1:
        for _ in range(4):
            comm.receive(piece, 0)
        comm.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.perf_counter()
    try:
        for _ in range(2000):
            comm.send(piece, 1)
            comm.wait(60.0)
        caught = "nothing"
    except PeerLost as lost:
        caught = str(lost)
    seconds = time.perf_counter() - begun
    comm.close()
    square = torch.ones(512, 512, device=comm.device)
    return {
        "caught": caught,
        "seconds": seconds,
        "gpu_works": float((square @ square)[0, 0]) == 512,
    }


def stop(comm: Any) -> dict[str, Any]:
    """Rank 1 never receives: a send must end at its limit."""
    import torch

    from overstory.workers.collectives import TransferTimeout

    if comm.rank == 1:
        word = comm.hear(60.0)
        return {"heard": word[1]}
    piece = torch.empty(GIB, dtype=torch.uint8, device=comm.device)
    begun = time.perf_counter()
    try:
        comm.send(piece, 1)
        comm.wait(3.0)
        caught = "nothing"
    except TransferTimeout as late:
        caught = str(late)
    seconds = time.perf_counter() - begun
    comm.tell("enough", 1)
    torch.cuda.synchronize()
    return {"caught": caught, "seconds": seconds}


def healthy(comm: Any) -> dict[str, Any]:
    """All that needs no fault, over one communicator; what fails ends it."""
    results: dict[str, Any] = {}
    for act in (exchange, plain_copy, small_words, weights, kv_rows):
        begun = time.perf_counter()
        try:
            results[act.__name__] = act(comm)
        except BaseException:
            results[act.__name__] = {"failed": traceback.format_exc()[-3000:]}
        (Path(os.environ[FOLDER]) / f"comm_rank_{comm.rank}.json").write_text(json.dumps(results))
        said = json.dumps(results[act.__name__])[:700]
        print(
            f"{act.__name__} of {comm.rank} ({time.perf_counter() - begun:.1f} s): {said}",
            flush=True,
        )
        if "failed" in results[act.__name__]:
            break
    return results


PARTS: dict[str, Act] = {act.__name__: act for act in (healthy, exchange, die, stop)}


# ------------------------------------------------------------------ processes


def rank_main(
    pipe: Any, name: str, rank: int, ticket: bytes | None, index: int, visible: str | None
) -> None:
    """One rank: everything that may fail is said by pipe."""
    faulthandler.dump_traceback_later(17, exit=False)
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    try:
        from overstory.workers.collectives import Door

        door: Any = Door() if ticket is None else ticket
        if ticket is None:
            pipe.send(("ticket", door.ticket))
        begun = time.perf_counter()
        comm = joined((name, rank), door, index)
        up_s = time.perf_counter() - begun
        result = PARTS[name.partition("@")[0]](comm)
        comm.close()
        pipe.send(("done", {**result, "up_s": up_s}))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()[-3000:]))


def run_pair(
    name: str, limit_s: float, indices: tuple[int, int] = (0, 1), visible: Any = (None, None)
) -> list[Any]:
    """Both ranks of a part; what each said."""
    pipes, processes, answers = [], [], []
    ticket = None
    try:
        for rank in (0, 1):
            ours, theirs = _SPAWN.Pipe()
            process = _SPAWN.Process(
                target=rank_main, args=(theirs, name, rank, ticket, indices[rank], visible[rank])
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
            if rank == 0:
                assert ours.poll(limit_s), "rank 0 said nothing"
                said, ticket = ours.recv()
                if said == "failed":
                    return [ticket]
        deadline = time.monotonic() + limit_s
        for ours, process in zip(pipes, processes, strict=True):
            if not ours.poll(max(0.0, deadline - time.monotonic())):
                answers.append("too late")
                continue
            try:
                answers.append(ours.recv()[1])
            except EOFError:
                process.join(5)
                answers.append(f"ended with {process.exitcode}")
        return answers
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


# ------------------------------------------------------------------ parts of one process


def surroundings() -> dict[str, Any]:
    """Which libraries there are."""
    import torch

    from overstory.workers.collectives.nccl import load_nccl, loaded_libraries

    library = load_nccl()
    return {
        "gpus": torch.cuda.device_count(),
        "peer_access": torch.cuda.can_device_access_peer(0, 1),
        "torch_nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "cupy_nccl": library.get_version(),
        "loaded": loaded_libraries("libnccl.so"),
        "nvls": os.environ.get("NCCL_NVLS_ENABLE"),
    }


def alone() -> dict[str, Any]:
    """A communicator of one rank, many times over: what stays."""
    import torch

    from overstory.workers.collectives import Door, Seat, connect

    device = device_of(0)

    def once(number: int) -> bool:
        comm = connect("nccl", Seat(f"alone-{number}", 0, 1), Door(), device)
        given = torch.arange(8.0, device=device)
        (part,) = comm.all_gather(given)
        comm.broadcast(given, 0)
        comm.wait()
        right = torch.equal(part, given)
        comm.close()
        return right

    def held() -> dict[str, int]:
        torch.cuda.synchronize()
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "gpu_bytes": torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0],
        }

    right = [once(0), once(1)]
    before = held()
    begun = time.perf_counter()
    right += [once(number) for number in range(2, 10)]
    return {
        "right": all(right),
        "seconds_each": (time.perf_counter() - begun) / 8,
        "before": before,
        "after": held(),
    }


def missing() -> dict[str, Any]:
    """Nobody comes: who is named, and when."""
    from overstory.workers.collectives import Door, RankMissing

    begun = time.perf_counter()
    try:
        joined(("missing", 0), Door(), 0, init_s=1.0)
    except RankMissing as error:
        return {"ranks": list(error.ranks), "seconds": time.perf_counter() - begun}
    return {"ranks": None}


def in_a_process(act: Callable[[], dict[str, Any]], limit_s: float) -> Any:
    """What a part of one process found: none may hold the others up."""
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_said, args=(theirs, act))
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(limit_s) else f"too late, not done in {limit_s:.0f} s"
    except EOFError:
        process.join(5)
        return f"ended with {process.exitcode}"
    finally:
        process.kill()
        process.join()


def _said(pipe: Any, act: Callable[[], dict[str, Any]]) -> None:
    faulthandler.dump_traceback_later(20, exit=False)  # where it hangs
    try:
        pipe.send(act())
    except BaseException:
        pipe.send({"failed": traceback.format_exc()[-3000:]})


def main() -> None:
    *only, folder, limit = sys.argv[1:]
    out, seconds = Path(folder), float(limit)
    deadline = time.monotonic() + seconds
    results: dict[str, Any] = {}

    writing = threading.Lock()

    os.environ[FOLDER] = str(out)

    def attempt(name: str, act: Act) -> None:
        left, begun = deadline - time.monotonic(), time.monotonic()
        try:
            limit_s = left - 8 if only else min(left, 40.0)
            result = act(limit_s) if left > 5 else "no time left"
        except BaseException:
            result = {"failed": traceback.format_exc()[-3000:]}
        with writing:
            results[name] = result
            took = time.monotonic() - begun
            print(f"{name} ({took:.1f} s): {json.dumps(result)[:3000]}", flush=True)
            (out / "comm.json").write_text(json.dumps(results, indent=1))

    if not only:
        attempt("surroundings", lambda left: in_a_process(surroundings, left))
    attempt("healthy", lambda left: so_far(run_pair("healthy", left), out))
    if only:
        sys.exit(0 if summarized("healthy", results["healthy"]) else 1)
    # By itself: it looks at the GPU's free memory.
    attempt("alone", lambda left: in_a_process(alone, min(left, 25.0)))
    # One process sees the second GPU alone, the other the first; then both in the other order; and
    # two ranks on one GPU, which NCCL refuses.
    side_by_side: dict[str, Act] = {
        "missing": lambda left: in_a_process(missing, min(left, 20.0)),
        "die": lambda left: run_pair("die", min(left, 20.0)),
        "stop": lambda left: run_pair("stop", min(left, 20.0)),
        "hidden": lambda left: run_pair("exchange@hidden", left, (0, 0), ("1", "0")),
        "swapped": lambda left: run_pair("exchange@swapped", left, (0, 1), ("1,0", "1,0")),
        "same_gpu": lambda left: run_pair("exchange@same", left, (0, 0)),
    }
    with ThreadPoolExecutor(len(side_by_side)) as pool:
        list(pool.map(attempt, side_by_side, side_by_side.values()))
    right = [summarized(name, results.get(name)) for name in results]
    sys.exit(0 if all(right) else 1)


def so_far(answers: list[Any], out: Path) -> list[Any]:
    """Of ranks that did not come to their end what they have written until then."""
    files = [out / f"comm_rank_{rank}.json" for rank in (0, 1)]
    return [
        answer
        if isinstance(answer, dict) or not file.exists()
        else json.loads(file.read_text()) | {"unfinished": answer}
        for answer, file in zip([*answers, *[None] * (2 - len(answers))], files, strict=True)
    ]


def summarized(name: str, result: Any) -> bool:
    """Says what counts of a part; whether it is as it should be."""
    judge = {
        "healthy": healthy_lines,
        "alone": alone_line,
        "missing": missing_line,
        "die": die_line,
        "stop": stop_line,
        "same_gpu": refused_line,
    }
    try:
        for line in judge.get(name, plain_line)(result):
            print(f"== {name}: {line}")
        return True
    except Exception as error:
        print(f"== {name} FAILED: {type(error).__name__} {error}; {last_words(result)}")
        return False


def last_words(result: Any) -> str:
    """Of tracebacks the last line, in one line in all."""
    parts = result if isinstance(result, list) else [result]
    return " | ".join(
        str(part["failed"] if isinstance(part, dict) and "failed" in part else part)
        .strip()
        .splitlines()[-1][:300]
        for part in parts
    )


def plain_line(result: Any) -> list[str]:
    for part in result if isinstance(result, list) else [result]:
        assert isinstance(part, dict), "did not end well"
        assert "failed" not in part, "did not end well"
        assert all(part.get(key, True) for key in ("right", "other", "parts")), "wrong values"
    return [json.dumps(result)[:600]]


def refused_line(result: Any) -> list[str]:
    assert all(isinstance(part, str) and "nccl" in part.lower() for part in result), (
        "two ranks on one GPU were not refused"
    )
    assert all("TypeError" not in part for part in result), "not for this reason"
    return [f"refused: {last_words(result)}"]


def die_line(result: Any) -> list[str]:
    survivor = result[0]
    assert "rank 1" in survivor["caught"], "the loss was not noticed"
    assert survivor["gpu_works"], "the survivor's GPU is of no more use"
    return [f"killed peer: {survivor}; the other {result[1]}"]


def missing_line(result: Any) -> list[str]:
    assert result["ranks"] == [1], f"who is missing was not said: {result}"
    return [f"a rank that does not come is named after {result['seconds']:.2f} s (limit 1 s)"]


def alone_line(result: Any) -> list[str]:
    assert result["right"], result
    kept = {k: result["after"][k] - result["before"][k] for k in result["before"]}
    assert kept["descriptors"] <= 2, f"descriptors stay: {kept}"
    assert kept["threads"] <= 1, f"threads stay: {kept}"
    assert kept["gpu_bytes"] < 64 << 20, f"GPU memory stays: {kept}"
    return [f"one rank, {result['seconds_each']:.2f} s each; after 8 more stay {kept}"]


def stop_line(result: Any) -> list[str]:
    assert "not done in" in result[0]["caught"], "the limit did not hold"
    assert result[1]["heard"] == "enough", "the word did not come"
    return [f"peer that does not receive: {result[0]}"]


def healthy_lines(result: Any) -> list[str]:
    sender, taker = result
    assert all(sender["exchange"][k] and taker["exchange"][k] for k in ("other", "shared", "parts"))
    plain = taker["plain_copy"]["gb_s"]
    best = taker["plain_copy"]["best_gb_s"]
    lines = [f"plain NCCL copy: {plain:.1f} GB/s, best {best:.1f}"]
    if "small_words" in taker:
        lines.append(f"all_gather of 16 bytes: {taker['small_words']['all_gather_us']:.0f} us")
    both = [part for part in ("kv_rows", "weights") if part in sender and part in taker]
    for part in both:
        rows = taker[part].items() if part == "kv_rows" else [("", taker[part])]
        for name, came in rows:
            if not isinstance(came, dict):
                continue
            sent = sender[part][name] if name else sender[part]
            assert sent["digest"] == came["digest"], (
                f"{part} {name}: what came is not what was sent"
            )
            lines += [
                f"{part} {name} by {size}: {rate:.1f} GB/s, {rate / plain:.2f} of plain"
                for size, rate in came["gb_s"].items()
            ]
            lines.append(f"{part} {name} filling alone: {sent['filling_gb_s']}")
    unfinished = {rank: r["unfinished"] for rank, r in enumerate(result) if "unfinished" in r}
    if unfinished or len(both) < 2:
        lines.append(f"NOT DONE: {unfinished or 'some parts'}; {last_words(result)}")
    return lines


if __name__ == "__main__":
    main()
