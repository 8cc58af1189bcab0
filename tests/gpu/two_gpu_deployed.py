"""Deployments on two or four GPUs, each on a Ray of its own: rolling restarts, TP 2 and 4, GPUs by
other numbers.

    two_gpu_deployed.py CASE OUT SECONDS

Needs SGLang and Ray on PYTHONPATH and the plugin's entry point; see two_gpu_session.sh. Cases may
run side by side. Writes OUT/deployed_CASE.json after each result. TWO_GPU_TOY=1 rehearses on CPUs.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "cluster"))

import stand_stacks
from load_clients import Question, Seen, ask
from test_deploy import Shell
from test_restart_load import Deployed, moves

from overstory.orchestrator.local_ray import stop_local_ray
from overstory.orchestrator.state import read_state
from overstory.workers.commands import EXTENSIONS_VARIABLE
from overstory.workers.tiny.prompts import heldout_prompts

TOY = os.environ.get("TWO_GPU_TOY") == "1"
MODEL = "overstory-tiny"
NEW = 120 if TOY else int(os.environ.get("TWO_GPU_NEW", "2400"))
"""Tokens of an answer: long enough to be under way when a replica goes."""
PROMPT_TOKENS = 300 if TOY else 1600
CLIENTS = 6
WARM_S = 15.0
"""Longest for what is compiled at the first answers, which no gap is to be taken from."""
ENDING_S = 20.0
"""For what is looked at after a deployment or a restart, and for the logs."""
NOSET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
ON_GPUS = (
    "resources.device=cuda",
    "engine.attention_backend=overstory",
    "engine.disable_prefill_cuda_graph=true",
    "engine.mem_fraction_static=0.35",
    "engine.max_total_tokens=65536",
    "engine.max_running_requests=8",
    "engine.cuda_graph_bs_decode=[1,4,8]",
)
ROLLING = ("replicas=2", "control.kv_hand_off_tokens=64")
ON = ("control.kv_hand_off=on", "control.weights_from_peer=on")
OFF = ("control.kv_hand_off=off", "control.weights_from_peer=off")
TIGHT = ("engine.max_total_tokens=4096",) if TOY else ()
ONE = ("engine.tp_size=1", *(("resources.cpus_per_rank=0.9", *TIGHT) if TOY else ()))
SEVERAL = (
    "control.compare_digests=gather",
    *(() if TOY else ("engine.enforce_disable_flashinfer_allreduce_fusion=true",)),
)
TP2 = ("engine.tp_size=2", *SEVERAL)
PAIR = (*ROLLING, *TP2, *(("resources.cpus_per_rank=0.45", *TIGHT) if TOY else ()))
"""Two replicas of two ranks, each with GPUs of its own: four in all."""
TP4 = ("engine.tp_size=4", *SEVERAL, *(("resources.cpus_per_rank=0.45",) if TOY else ()))
TOLD = ("pid", "forwards", "weights", "stood_s", "stands", "meetings")
"""Of a rank, from the status."""
LONG_S = 0.12
"""A gap of a stream that is told by itself."""


@dataclass(frozen=True)
class Case:
    """A deployment.

    Attributes:
        settings: over those of the local preset.
        environment: of the Ray.
        restart: whether it is restarted under load.
    """

    settings: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    restart: bool = False


CASES = {
    "rolling_on": Case(
        (*ROLLING, *ONE, *ON),
        {NOSET: "1"},
        restart=True,
    ),
    "rolling_off": Case((*ROLLING, *ONE, *OFF), restart=True),
    "tp2_noset1": Case(TP2, {NOSET: "1"}),
    "tp2_noset0": Case(TP2, {NOSET: "0"}),
    "tp2_unset": Case(TP2),
    "pair_on": Case((*PAIR, *ON), {NOSET: "1"}, restart=True),
    "pair_off": Case((*PAIR, *OFF), restart=True),
    "tp4_noset1": Case(TP4, {NOSET: "1"}),
    "tp4_unset": Case(TP4),
    "second_gpu_noset0": Case(
        ("engine.tp_size=1",), {NOSET: "0"} | ({} if TOY else {"CUDA_VISIBLE_DEVICES": "1"})
    ),
}


class HereShell(Shell):
    """Without an installed command."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        super().__init__(folder)
        self.environment |= environment

    def __call__(self, *arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        words = "from overstory.orchestrator.cli import main; main()"
        return subprocess.run(
            [sys.executable, "-c", words, *arguments],
            capture_output=True,
            text=True,
            env=self.environment,
            timeout=timeout_s,
        )


class Answers(Seen):
    """What clients saw that ask without a pause, each time something new: no prefix cache knows a
    sequence that moves. Of texts the lengths are checked: in bfloat16 they depend on the batch."""

    def __init__(self, url: str, clients: int) -> None:
        super().__init__()
        self.long_gaps: list[tuple[float, float]] = []
        self._url, self._numbers, self._stop = url, itertools.count(), threading.Event()
        self._every = [prompt.text for prompt in heldout_prompts()]
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(clients)]

    def __enter__(self) -> Answers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30.0)

    def _ask(self) -> None:
        while not self._stop.is_set():
            number = next(self._numbers)
            body = {"model": MODEL, "prompt": self._prompt(number), "max_tokens": NEW}
            kind = {"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0.0}
            try:
                question = Question(body | kind | {"ignore_eos": True}, stream=True)
                answer, gap_s = ask(self._url, question, self._gap)
            except Exception as error:
                self.failed.append(f"{type(error).__name__}: {error}")
                continue
            self.answers += 1
            self.tokens += answer[2][1]
            self.gaps_s.append((time.monotonic(), gap_s))
            if answer[1:] != ("length", (answer[2][0], NEW)):
                self.changed.append(f"request {number}: {answer[1:]}")

    def _gap(self, at_s: float, gap_s: float) -> None:
        if gap_s > LONG_S:
            self.long_gaps.append((at_s, gap_s))

    def _prompt(self, number: int) -> str:
        text = f"# {number}\n"
        place = number
        while len(text) < PROMPT_TOKENS * len(self._every[0]) / 160:
            text += self._every[place % len(self._every)]
            place += 1
        return text


def gpus_of(pids: list[int]) -> dict[int, str]:
    """UUIDs of the GPUs that processes compute on, as far as the driver tells."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
        )
    except OSError:
        return {}
    rows = (line.split(", ") for line in done.stdout.splitlines() if ", " in line)
    found = {int(pid): uuid for pid, uuid in rows}
    return {pid: found[pid] for pid in pids if pid in found}


def picture(deployed: Deployed) -> dict[str, Any]:
    """What the status says of replicas and hand-offs."""
    done = deployed.shell("status", "--json", timeout_s=60)
    found: dict[str, Any] = json.loads(done.stdout)["controller"]
    return found


def ranks_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    ranks = [
        {"replica": replica["name"], "phase": replica["phase"], "rank": number}
        | {name: rank.get(name) for name in TOLD}
        for replica in found["replicas"]
        for number, rank in enumerate(replica["ranks"])
    ]
    where = gpus_of([rank["pid"] for rank in ranks if rank["pid"]])
    return [rank | {"gpu": where.get(rank["pid"])} for rank in ranks]


def period(seen: Answers, act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What the clients saw while ``act`` ran: `long_gaps` are when each ended, after the begin, and
    its length; `began` counts from 1970, as `stands` of ranks do."""
    began = round(time.time(), 2)
    begun, before = time.monotonic(), (seen.answers, len(seen.failed), len(seen.changed))
    more = act()
    ended = time.monotonic()
    counted = (seen.answers, len(seen.failed), len(seen.changed))
    names = ("answers", "failed", "changed")
    return {
        "seconds": round(ended - begun, 2),
        **{name: b - a for name, a, b in zip(names, before, counted, strict=True)},
        "worst_gap_s": round(seen.worst_gap_s(begun, ended), 3),
        "began": began,
        "long_gaps": [
            (round(at - begun, 2), round(gap, 3))
            for at, gap in sorted(seen.long_gaps)
            if begun <= at <= ended
        ][:40],
    } | more


def warmed(seen: Seen) -> dict[str, Any]:
    """Each client has had an answer and is at a later one, whose gaps are those of this replica."""
    until = time.monotonic() + WARM_S
    while seen.answers < 2 * CLIENTS and time.monotonic() < until:
        time.sleep(0.05)
    return {}


def wait_s(seconds: float) -> dict[str, Any]:
    time.sleep(seconds)
    return {}


def restart(deployed: Deployed, left_s: float) -> dict[str, Any]:
    """One that does not end in time is told as far as it came; what follows is looked at all the
    same."""
    try:
        done = deployed.shell("restart", timeout_s=left_s)
        code, said = done.returncode, done.stderr
    except subprocess.TimeoutExpired as late:
        code, said = f"not over after {left_s:.0f} s", (late.stderr or b"").decode()
    seconds = [float(s) for s in re.findall(r"took over after ([0-9.]+) s", said)]
    return {"code": code, "seconds_by_replica": seconds, "said": said[-3000:]}


def run(name: str, report: Callable[[str, Any], None], deadline: float, folder: Path) -> None:
    case = CASES[name]
    deployed = Deployed(folder)
    stacks = folder / "stacks"
    stacks.mkdir()
    watched = {
        stand_stacks.VARIABLE: str(stacks),
        EXTENSIONS_VARIABLE: "stand_stacks:register",
        "PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}",
    }
    deployed.shell = HereShell(folder, watched | case.environment)
    left = lambda: deadline - time.monotonic()  # noqa: E731
    try:
        begun = time.monotonic()
        sets = (
            f"gateway.port={deployed.port}",
            "tree.budget=15",
            "engine.context_length=4096",
            *(() if TOY else ON_GPUS),
            *case.settings,
        )
        words = [part for one in sets for part in ("--set", one)]
        limit_s = max(10.0, left() - ENDING_S)
        done = deployed.shell(
            "deploy",
            str(deployed.file),
            *words,
            "--timeout",
            str(int(limit_s)),
            timeout_s=limit_s + 5,
        )
        report("deploy", {"seconds": round(time.monotonic() - begun, 1), "code": done.returncode})
        report("deploy_said", done.stderr[-3000:])
        if done.returncode:
            return
        report("ranks", ranks_of(picture(deployed)))
        with Answers(deployed.url, CLIENTS) as seen:
            begun_at = time.time()
            report("first answers", period(seen, lambda: warmed(seen)))
            report("undisturbed", period(seen, lambda: wait_s(4.0)))
            report("compiled at first", stand_stacks.compiled_since(begun_at))
            if case.restart:
                begun_at = time.time()
                report("restart", period(seen, lambda: restart(deployed, left() - ENDING_S)))
                report("compiled", stand_stacks.compiled_since(begun_at))
                report("stacks", stand_stacks.told(stacks))
                report("moved", moves(deployed.url))
                found = picture(deployed)
                report("hand_offs", found["hand_offs"])
                report("ranks_after", ranks_of(found))
        report("seen", {"answers": seen.answers, "tokens": seen.tokens})
        report("examples", [*seen.failed[:3], *(one[:600] for one in seen.changed[:3])])
        report("ranks_at_the_end", ranks_of(picture(deployed)))
    finally:
        own = read_state(deployed.shell.state).local_ray
        if own is not None:
            report("logs", logs(Path(own.folder)))
            stop_local_ray(own)


def logs(folder: Path) -> dict[str, str]:
    """The end of what Ray's processes have said, those that said something of note."""
    found = {}
    for file in sorted(folder.glob("r/session_*/logs/worker*.err"), key=os.path.getmtime)[-14:]:
        lines = file.read_text(errors="replace").splitlines()
        telling = [x for x in lines if re.search(r"KV|weights|rror|WARN|Traceback|diverge", x)]
        found[file.name] = "\n".join([*telling[-25:], "...", *lines[-12:]])[-5000:]
    return found


def main() -> None:
    name, out, begun = sys.argv[1], Path(sys.argv[2]), time.monotonic()
    deadline = begun + float(sys.argv[3])
    results: dict[str, Any] = {"case": name}

    def report(what: str, value: Any) -> None:
        results[what] = value
        if what not in ("logs", "deploy_said", "stacks"):
            at = time.monotonic() - begun
            print(f"== [{at:.0f} s] {name} {what}: {json.dumps(value)[:1500]}", flush=True)
        (out / f"deployed_{name}.json").write_text(json.dumps(results, indent=1))

    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            run(name, report, deadline, Path(folder))
    except BaseException:
        report("failed", traceback.format_exc()[-5000:])
    os._exit("failed" in results)


if __name__ == "__main__":
    main()
