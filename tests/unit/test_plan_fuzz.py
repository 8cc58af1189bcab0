"""Deployment files with something odd in them: planned, or refused in words. Never a traceback."""

import copy
import random
from pathlib import Path
from typing import Any

import yaml

from overstory.orchestrator.errors import UserFault
from overstory.orchestrator.inventory import NodeInventory
from overstory.orchestrator.plan import make_plan
from overstory.orchestrator.plan_text import render_plan
from overstory.orchestrator.spec import DeploymentSpec, load_spec

CLUSTERS = Path(__file__).parents[2] / "clusters"
SHIPPED = [yaml.safe_load(path.read_text()) for path in sorted(CLUSTERS.glob("*/deployment*.yaml"))]
GIB = 2**30
NODES = [NodeInventory(f"h{n}", 64, 8, 512 * GIB, gpu_memory=95 * GIB) for n in range(2)]
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 3, 2**31, 10**30, 1.5, -0.5, float("inf"), float("nan")),
    *("", " ", "x", "auto", "é", "../..", "/etc/passwd", "1e400", [], [1], ["a"], {}, {"a": [1]}),
]
SECTIONS = ("tree", "resources", "gateway", "control")
ENGINE = (
    *("tp_size", "ep_size", "context_length", "max_running_requests", "mem_fraction_static"),
    *("kv_cache_dtype", "page_size", "chunked_prefill_size", "cuda_graph_bs_decode", "dtype"),
    *("max_total_tokens", "attention_backend", "quantization", "watchdog_timeout", "pp_size"),
    *("ep_num_redundant_experts", "enable_eplb", "moe_runner_backend", "cuda_graph_max_bs_decode"),
)


def _keys() -> list[tuple[str, ...]]:
    whole = [(name,) for name in DeploymentSpec.model_fields]
    for section in SECTIONS:
        inner = DeploymentSpec.model_fields[section].annotation
        whole += [(section, name) for name in inner.model_fields]  # type: ignore[union-attr]
    return whole + [("engine", name) for name in ENGINE] * 3


def _odd_file(draw: random.Random) -> dict[str, Any]:
    document = copy.deepcopy(draw.choice(SHIPPED))
    for _ in range(draw.choice((1, 1, 2, 3))):
        section, *name = draw.choice(_keys())
        if not name:
            document[section] = copy.deepcopy(draw.choice(ODD))
        elif isinstance(document.setdefault(section, {}), dict):
            document[section][name[0]] = copy.deepcopy(draw.choice(ODD))
    return document


def test_whatever_stands_in_the_file(tmp_path: Path) -> None:
    draw, path = random.Random(0), tmp_path / "deployment.yaml"
    planned, refusals = 0, []
    for _ in range(150):
        path.write_text(yaml.safe_dump(_odd_file(draw)))
        try:
            render_plan(make_plan(load_spec(path), NODES, published=True))
            planned += 1
        except UserFault as fault:
            refusals.append(str(fault).strip())
        except Exception as error:
            error.add_note(path.read_text())
            raise
    assert planned
    assert all(refusals)
    assert len(refusals) > planned
