"""The act behind `overstory report`: asks a running deployment and writes the report."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from overstory.orchestrator import serving
from overstory.orchestrator.control import connected
from overstory.orchestrator.host_facts import host_facts
from overstory.orchestrator.output_file import check_writable, write_output
from overstory.orchestrator.report import make_report, read_benchmarks, render_report
from overstory.orchestrator.status import gather


def report(name: str | None, benchmarks: Sequence[Path], as_json: bool, out: Path | None) -> None:
    """Prints the report, or writes it to `out`.

    Raises:
        StateError, ClusterError, ReportError: for the user to mend.
    """
    check_writable("--out", out)
    results = read_benchmarks(benchmarks)
    with connected(name) as record:
        serving.quiet_serve_logs()
        made = make_report(dataclasses.asdict(record), gather(record), host_facts(), results)
    text = json.dumps(made.to_dict(), indent=1) if as_json else render_report(made)
    if out is None:
        print(text)
    else:
        write_output("--out", out, text + "\n")
