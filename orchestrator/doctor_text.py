"""A diagnosis as text for a person. Pure."""

from collections.abc import Iterator

from overstory.orchestrator.doctor import Diagnosis
from overstory.orchestrator.node_facts import NodeFacts
from overstory.orchestrator.wording import counted

_GIB = 2.0**30


def _node_lines(node: NodeFacts) -> Iterator[str]:
    role = ", head" if node.head else ""
    yield f"{node.name} ({node.address}{role})"
    listed = ", ".join(f"{name} {version or 'none'}" for name, version in node.packages.items())
    yield f"  python {node.python}, {listed}"
    kinds = sorted({gpu.name for gpu in node.gpus})
    if kinds:
        yield f"  {len(node.gpus)} GPUs ({', '.join(kinds)}), driver {node.driver}"
    else:
        yield "  no GPU"
    yield (
        f"  {node.cpus:g} CPUs, {node.memory_free / _GIB:.1f} of {node.memory / _GIB:.1f} GiB "
        f"memory free, {node.shm_free / _GIB:.1f} GiB of /dev/shm, {node.open_files} open files, "
        f"clock {node.clock_offset:+.3f} s"
    )


def render_diagnosis(diagnosis: Diagnosis) -> str:
    """Several lines, without a trailing newline."""
    where = diagnosis.ray or "this machine alone: no Ray runs (bring one up to see its nodes)"
    lines = [f"Looked at {where}"]
    for node in diagnosis.facts.nodes:
        if not node.fault:
            lines += _node_lines(node)
    for link in diagnosis.facts.links:
        if link.seconds is not None:
            lines.append(
                f"{link.source} -> {link.target}: {1e3 * link.seconds:.2f} ms there and back, "
                f"{link.rate / 1e9:.2f} GB/s in one stream"
            )
    if not diagnosis.findings:
        return "\n".join([*lines, "nothing is wrong"])
    for finding in diagnosis.findings:
        where = f" {finding.node}" if finding.node else ""
        lines.append(f"{finding.severity}: {finding.check}{where}: {finding.found}")
        lines.append(f"  fix: {finding.fix}")
    warnings = len(diagnosis.findings) - diagnosis.errors
    return "\n".join(
        [*lines, f"{counted(diagnosis.errors, 'error')}, {counted(warnings, 'warning')}"]
    )
