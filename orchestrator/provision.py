"""Puts our Grafana dashboards beside Ray's own, where its Grafana configuration looks."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

FOLDER = Path("metrics", "grafana", "dashboards")
"""Below a Ray session's folder on the head node; Ray makes it where its dashboard runs."""


def session_folder() -> Path:
    """Of the Ray that this process is connected to, on this node."""
    from ray._private.worker import global_worker

    return Path(global_worker.node.get_session_dir_path())


def write_dashboards(session: Path) -> list[str]:
    """Writes the dashboards; their paths. Empty where Ray provides for no Grafana."""
    folder = session / FOLDER
    if not folder.is_dir():
        return []
    written = []
    for file in resources.files("overstory.clusters").joinpath("monitoring").iterdir():
        if file.name.endswith(".json"):
            target = folder / file.name
            target.write_text(file.read_text())
            written.append(str(target))
    return sorted(written)


def write_dashboards_here() -> list[str]:
    """`write_dashboards` into the session of this node."""
    return write_dashboards(session_folder())
