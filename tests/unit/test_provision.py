"""Dashboards in the folder that Ray's Grafana configuration names."""

import json
from pathlib import Path

from overstory.orchestrator.dashboards import DASHBOARDS
from overstory.orchestrator.provision import FOLDER, write_dashboards


def test_every_dashboard_goes_where_ray_has_a_folder(tmp_path: Path) -> None:
    assert write_dashboards(tmp_path) == []
    (tmp_path / FOLDER).mkdir(parents=True)
    written = write_dashboards(tmp_path)
    assert [Path(path).stem for path in written] == sorted(DASHBOARDS)
    for path in written:
        assert json.loads(Path(path).read_text())["panels"]
    assert write_dashboards(tmp_path) == written  # again, over the old ones
