"""`make demo`: the built-in model on this machine, a streamed completion, what speculation gained.

What it prints is measured in this very run; the endpoint stays up.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from overstory.orchestrator.bench import measure
from overstory.orchestrator.bench_rows import BenchSettings, Sample, render_rows, summarise
from overstory.orchestrator.control import connected
from overstory.orchestrator.deploy import deploy
from overstory.orchestrator.errors import UserFault
from overstory.orchestrator.generate import generate
from overstory.orchestrator.interrupts import end_tidily
from overstory.orchestrator.inventory import local_gpu_memory
from overstory.orchestrator.plan import check_models
from overstory.orchestrator.progress import Progress
from overstory.orchestrator.spec import DeploymentSpec, load_spec
from overstory.orchestrator.state import DeploymentRecord
from overstory.workers.tree_policy import Policy, TreePolicy

PROMPT = '''def binary_search(items, wanted):
    """Index of wanted in the sorted list items, or -1."""
'''
DEPLOY_TIMEOUT_S = 600.0
_ON_ONE_GPU = (
    *("resources.device=cuda", "engine.tp_size=1", "engine.attention_backend=overstory"),
    # A small model: neither all of the GPU's memory nor graphs for hundreds of requests.
    *("engine.mem_fraction_static=0.3", "engine.max_total_tokens=65536"),
    *("engine.max_running_requests=8", "engine.cuda_graph_bs_decode=[1,2,4,8]"),
)


def chosen_device(wanted: str, gpus: int) -> str:
    """`cpu` or `cuda`: what is `wanted`, or for `auto` a GPU where there is one.

    Raises:
        UserFault: a GPU is wanted and there is none.
    """
    if wanted == "auto":
        return "cuda" if gpus else "cpu"
    if wanted == "cuda" and not gpus:
        raise UserFault("DEVICE=cuda: nvidia-smi shows no GPU here; DEVICE=auto takes the CPU then")
    return wanted


def _spec(file: Path, wanted: str, overrides: Sequence[str]) -> DeploymentSpec:
    device = chosen_device(wanted, len(local_gpu_memory()))
    if device == "cpu":
        return load_spec(file, overrides)
    print("One rank on this machine's GPU, with CUDA graphs (DEVICE=cpu takes the CPU).")
    return load_spec(file, (*_ON_ONE_GPU, *overrides))


def _show_gain(record: DeploymentRecord, started_with: Policy) -> None:
    """Measures plain decoding against the deployment's policy on held-out prompts, prints both."""
    if started_with == TreePolicy("plain"):
        print(
            "Nothing to compare: this deployment does not speculate (no drafter, or tree.budget 0)."
        )
        return
    policy = str(started_with)
    settings = BenchSettings(
        modes=("plain", policy),
        prompts=4,
        max_new_tokens=96,
        concurrency=(1,),
        temperatures=(0.0,),
        rounds=2,
    )
    samples: list[Sample] = []
    with connected(record.name):
        measure(record, settings, lambda _: None, samples)
    rows = summarise(samples)
    print(render_rows(rows))
    gain = next(row for row in rows if row["mode"] == policy)
    print(
        f"With {policy} a forward of the target gave {gain['tokens_per_forward']:.2f} tokens, and "
        f"the endpoint {gain['speedup']:.2f} times the tokens/s of plain decoding, measured just "
        f"now on {settings.prompts} held-out prompts of Python code, one request at a time, greedy."
    )


def _present(record: DeploymentRecord, policy: Policy, seconds: float) -> None:
    """Completes, measures and says what can be done next."""
    print(f"\nReady after {seconds:.0f} s. A completion, streamed through the endpoint:\n")
    print(PROMPT, end="", flush=True)
    generate(PROMPT, {"max_tokens": 96, "temperature": 0.0}, record.name, None, chat=False)
    print("\nWhat speculation gains here:\n", flush=True)
    _show_gain(record, policy)
    print(
        f"\nThe endpoint stays up at {record.endpoint} (OpenAI-compatible). Try:\n"
        f"  .venv/bin/overstory generate 'class Stack:' --temperature 0.7 --seed 1\n"
        f"  .venv/bin/overstory status\n"
        f"  make down"
    )


def demo(file: Path, device: str, overrides: Sequence[str] = ()) -> None:
    """Deploy, complete, measure. `overrides` go over the file's settings, `KEY=VALUE`.

    Raises:
        UserFault: something of it could not be done, or it was interrupted once it was up.
    """
    spec = _spec(file, device, overrides)
    policy = check_models(spec).rule
    progress = Progress(sys.stdout)
    record = deploy(spec, progress, DEPLOY_TIMEOUT_S)
    try:
        _present(record, policy, progress.seconds)
    except (KeyboardInterrupt, SystemExit) as signal:  # Ray turns SIGTERM into SystemExit.
        raise UserFault(
            f"interrupted; the endpoint stays up at {record.endpoint}, `make down` takes it away"
        ) from signal


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    given = parser.parse_args()
    end_tidily()
    try:
        demo(given.file, given.device, given.set)
    except UserFault as fault:
        sys.exit(f"error: {fault}")
    except KeyboardInterrupt:  # While a Ray was looked for or started: that is taken away again.
        sys.exit("error: interrupted")


if __name__ == "__main__":
    main()
