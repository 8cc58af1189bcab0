"""Load generators and a fuzzer of others, unmodified, against the endpoint.

What they measured is kept where `OVERSTORY_TEST_RESULTS` names a folder.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from fixtures_endpoint import Endpoint, pair_paths
from leftovers import wait_until
from throwaway_tools import tool

from overstory.workers.tiny.paths import resolve_model

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]

REQUESTS, CONCURRENCY = 24, 4
CASES = 2000


def keep(name: str, result: Any) -> None:
    """Where the caller wants the results, there they go."""
    if folder := os.environ.get("OVERSTORY_TEST_RESULTS"):
        Path(folder, name).write_text(json.dumps(result, indent=1) + "\n")


def run(command: list[Any], folder: Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Runs a program in `folder`; its output is captured."""
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=timeout_s,
    )


def tokenizer() -> str:
    target, _ = pair_paths()
    return resolve_model(target)


def test_sglang_bench_serving(real: Endpoint, tmp_path: Path) -> None:
    for backend in ("sglang-oai", "sglang-oai-chat"):
        out = tmp_path / f"{backend}.jsonl"
        command = [sys.executable, "-m", "sglang.bench_serving", "--backend", backend]
        command += ["--base-url", real.url, "--model", real.spec.served_model_name]
        command += ["--tokenizer", tokenizer(), "--dataset-name", "random-ids"]
        command += ["--random-input-len", "64", "--random-output-len", "32"]
        command += ["--num-prompts", str(REQUESTS), "--max-concurrency", str(CONCURRENCY)]
        done = run([*command, "--output-file", out], tmp_path, 600)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        result = json.loads(out.read_text().splitlines()[-1])
        assert result["completed"] == REQUESTS
        assert result["total_output_tokens"] > 0
        assert result["mean_ttft_ms"] > 0
        keep(f"bench_serving_{backend}.json", result)
    wait_until(real.idle, 30, "nothing to run on")


def test_aiperf(real: Endpoint, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    program = tool("aiperf", tmp_path_factory.mktemp("tools"))
    url = httpx.URL(real.url)
    path = f"{url.path}/v1/completions"
    command = [program, "profile", "--model", real.spec.served_model_name]
    command += ["--url", f"http://{url.host}:{url.port}", "--custom-endpoint", path]
    command += ["--endpoint-type", "completions", "--streaming", "--tokenizer", tokenizer()]
    command += ["--request-count", REQUESTS, "--concurrency", CONCURRENCY]
    command += ["--synthetic-input-tokens-mean", 64, "--output-tokens-mean", 32]
    command += ["--extra-inputs", "ignore_eos:true", "--random-seed", 7]
    command += ["--artifact-dir", tmp_path / "artifacts", "--ui", "none"]
    done = run(command, tmp_path, 900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (found,) = (tmp_path / "artifacts").rglob("profile_export_aiperf.json")
    result = json.loads(found.read_text())
    assert result["request_count"]["avg"] == REQUESTS
    assert not result.get("error_summary")
    assert result["output_token_throughput"]["avg"] > 0
    keep("aiperf.json", result)
    wait_until(real.idle, 30, "nothing to run on")


def test_schemathesis(
    scripted: Endpoint, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    program = tool("schemathesis", tmp_path_factory.mktemp("tools"))
    schema = httpx.get(scripted.url + "/openapi.json").json()
    (tmp_path / "openapi.json").write_text(json.dumps(schema))
    by_mode = {
        mode: fuzz(program, tmp_path, scripted.url, mode, examples)
        for mode, examples in (("positive", 150), ("all", 60))
    }
    statuses = {status for found in by_mode.values() for status in found}
    assert all(int(status) < 500 for status in statuses), by_mode
    assert {"200", "400"} <= statuses
    cases = sum(sum(found.values()) for found in by_mode.values())
    assert cases >= CASES, by_mode
    keep("schemathesis.json", {"cases": cases, "answers_by_mode_and_status": by_mode})
    wait_until(scripted.idle, 60, "nothing to run on")


def fuzz(program: Path, folder: Path, url: str, mode: str, examples: int) -> dict[str, int]:
    """Answers by status to what schemathesis draws: `positive` fits the document, `all` need not.
    A request without an answer within 40 s, and an answer of 500 and above, fail."""
    events = folder / f"{mode}.ndjson"
    command = [program, "run", folder / "openapi.json", "--url", url, "--mode", mode]
    command += ["--phases", "examples,coverage,fuzzing", "--max-examples", examples]
    # One worker: CPython 3.11 counts the depth of ast.parse for all threads together, hypothesis
    # parses its own strategies ("AST constructor recursion depth mismatch", cpython#106905).
    command += ["--checks", "not_a_server_error", "--request-timeout", 40, "--workers", 1]
    command += ["--seed", 1, "--no-shrink", "--suppress-health-check", "all", "--no-color"]
    command += ["--report", "ndjson", "--report-ndjson-path", events]
    done = run(command, folder, 600)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    return answered(events)


def answered(events: Path) -> dict[str, int]:
    """Answers by HTTP status in schemathesis' own record of its requests."""
    found: dict[str, int] = {}
    for line in events.read_text().splitlines():
        for status in _statuses(json.loads(line)):
            found[str(status)] = found.get(str(status), 0) + 1
    return dict(sorted(found.items()))


def _statuses(event: Any) -> list[int]:
    """Status codes of the responses anywhere in an event."""
    if isinstance(event, dict):
        own = [event["status_code"]] if isinstance(event.get("status_code"), int) else []
        return own + [status for value in event.values() for status in _statuses(value)]
    if isinstance(event, list):
        return [status for value in event for status in _statuses(value)]
    return []
