"""Routing by what the replicas' own prefix caches hold, with real engines."""

import random
from typing import Any

import pytest
import ray
from fixtures_endpoint import REAL_START_S, Endpoint, _serve, pair_paths
from leftovers import wait_until
from ray import serve

from overstory.orchestrator.app import build_app
from overstory.orchestrator.journal import GenerateCall
from overstory.orchestrator.local_ray import free_port
from overstory.orchestrator.prefix_blocks import BLOCK_TOKENS, blocks_of
from overstory.orchestrator.rank_group import CONTROL, NAMESPACE, call, rank_name
from overstory.orchestrator.sampling import Sampling
from overstory.orchestrator.spec import DeploymentSpec

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

PROMPTS = 6
BLOCKS = 3


def _replicas(name: str) -> list[str]:
    listed = ray.util.list_named_actors(all_namespaces=True)
    mine = [row["name"] for row in listed if row["name"].startswith(f"overstory/{name}/")]
    return sorted(full.split("/")[2] for full in mine if full.endswith("/rank-0"))


def _of_rank(name: str, replica: str, method: str) -> Any:
    actor = ray.get_actor(rank_name(name, replica, 0), namespace=NAMESPACE)
    return ray.get(call(actor, CONTROL, method), timeout=30)


def _computed(name: str) -> dict[str, int]:
    """Prompt tokens that each replica has computed."""
    return {
        replica: _of_rank(name, replica, "report")["steps"]["prefill"]["tokens"]
        for replica in _replicas(name)
    }


def _send_past_the_gateway(endpoint: Endpoint, ids: tuple[int, ...], number: int) -> None:
    sampling = Sampling(seed=0, max_new_tokens=1, temperature=0.0)
    handle = endpoint.replica.options(stream=True)
    for _ in handle.generate.remote(GenerateCall(f"direct-{number}", ids, sampling)):
        pass


def test_a_prompt_goes_where_its_beginning_is_cached(serve_here: int) -> None:
    target, _ = pair_paths()
    spec = DeploymentSpec(
        name="affine",
        model=target,
        served_model_name="tiny",
        tree={"budget": 0},
        replicas=2,
        resources={"cpus_per_rank": 0.5},
        engine={"tp_size": 1, "context_length": 1024},
        gateway={"port": free_port(), "routing": "prefix_affine"},
    )
    endpoint = _serve(build_app(spec), spec, REAL_START_S)
    try:
        wait_until(lambda: len(_replicas(spec.name)) == 2, 120, "both replicas")
        draw = random.Random(3)
        prompts = [
            tuple(draw.choices(range(300, 3000), k=BLOCKS * BLOCK_TOKENS)) for _ in range(PROMPTS)
        ]
        for number, ids in enumerate(prompts):
            _send_past_the_gateway(endpoint, ids, number)
        held = {
            replica: set(_of_rank(spec.name, replica, "prefixes").hashes)
            for replica in _replicas(spec.name)
        }
        homes = [
            next(name for name, blocks in held.items() if set(blocks_of(ids)) <= blocks)
            for ids in prompts
        ]
        wait_until(
            lambda: sum(endpoint.snapshot()["prefix_blocks"].values()) >= PROMPTS * BLOCKS,
            60,
            "the gateway to know what the caches hold",
        )
        for ids, home in zip(prompts, homes, strict=True):
            before = _computed(spec.name)
            answer = endpoint.post(prompt=[*ids, 5, 6, 7], max_tokens=1, temperature=0)
            assert answer.status_code == 200
            grown = {name: count - before[name] for name, count in _computed(spec.name).items()}
            assert sum(grown.values()) == grown[home] < BLOCK_TOKENS, (home, grown)
    finally:
        serve.delete(spec.name)
