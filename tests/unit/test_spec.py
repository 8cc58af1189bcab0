"""A deployment file is refused in words: the key, what it got, what it wants, the way out."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from overstory.orchestrator.spec import (
    ControlSpec,
    DeploymentSpec,
    GatewaySpec,
    ResourceSpec,
    SpecError,
    TreeSpec,
    load_spec,
    parse_override,
    parse_spec,
)

GOOD: dict[str, Any] = {"model": "overstory-tiny", "drafter": "overstory-tiny-drafter"}


def problems(**changes: Any) -> list[str]:
    with pytest.raises(SpecError) as caught:
        parse_spec({**GOOD, **changes})
    return caught.value.problems


def test_defaults_fill_a_minimal_deployment() -> None:
    spec = parse_spec(GOOD)
    assert spec.served_model_name == "overstory-tiny"
    assert (spec.replicas, spec.tp_size, spec.tree.budget) == (1, 1, 31)
    assert spec.resources.gpus == 0
    assert spec.gateway.max_queued_requests == 64


def test_the_gateway_s_two_ports_differ() -> None:
    (problem,) = problems(gateway={"port": 8001, "token_port": 8001})
    assert "token_port is 8001, as port is" in problem
    assert parse_spec({**GOOD, "gateway": {"token_port": 8001}}).gateway.ports == [8000, 8001]
    assert parse_spec(GOOD).gateway.ports == [8000]


def test_served_name_is_the_last_part_of_a_path() -> None:
    assert parse_spec({**GOOD, "model": "/models/Kimi-K2/"}).served_model_name == "Kimi-K2"
    assert parse_spec({**GOOD, "served_model_name": "k2"}).served_model_name == "k2"


@pytest.mark.parametrize(
    ("written", "cpu", "cuda"),
    [("auto", False, True), ("on", True, True), (True, True, True), (False, False, False)],
)
def test_a_bare_on_or_off_of_yaml_is_a_word(written: Any, cpu: bool, cuda: bool) -> None:
    control = {"kv_hand_off": written, "weights_from_peer": written}
    for device, wanted in (("cpu", cpu), ("cuda", cuda)):
        spec = parse_spec({**GOOD, "control": control, "resources": {"device": device}})
        assert (spec.hands_over_kv, spec.hands_over_weights) == (wanted, wanted)


@pytest.mark.parametrize(
    "section", [DeploymentSpec, TreeSpec, ResourceSpec, GatewaySpec, ControlSpec]
)
def test_every_setting_is_documented(section: type[BaseModel]) -> None:
    undocumented = [
        name
        for name, field in section.model_fields.items()
        if not field.description and not isinstance(field.default, BaseModel)
    ]
    assert undocumented == []


def test_unknown_key_is_refused_with_the_nearest_known_one() -> None:
    assert problems(tree={"budgett": 3}) == ["tree.budgett: unknown key; did you mean `budget`?"]
    assert "known here: name, model" in problems(zzz=1)[0]


def test_all_faults_come_at_once() -> None:
    found = problems(replicas=0, gateway={"port": 70000}, tree={"budget": -1})
    assert [line.split(":")[0] for line in found] == ["replicas", "tree.budget", "gateway.port"]


def test_pages_of_several_slots() -> None:
    paged = {**GOOD, "engine": {"page_size": 64}}
    assert parse_spec(paged).engine["page_size"] == 64
    (found,) = problems(engine={"page_size": 64}, control={"defrag_every_s": 5})
    assert "control.defrag_every_s is 5 with engine.page_size: 64" in found
    assert parse_spec({**paged, "control": {"defrag_every_s": 0}})


@pytest.mark.parametrize("budget", [0, 1, 7, 63])
def test_budgets_in_range(budget: int) -> None:
    assert parse_spec({**GOOD, "tree": {"budget": budget}}).tree.budget == budget


@pytest.mark.parametrize(
    ("budget", "wanted"), [(-1, "greater than or equal to 0"), (64, "less than or equal to 63")]
)
def test_budget_out_of_range(budget: int, wanted: str) -> None:
    assert problems(tree={"budget": budget}) == [f"tree.budget: got {budget}, wanted {wanted}"]


def test_wrong_types_name_what_came() -> None:
    assert problems(replicas="many")[0].startswith("replicas: got 'many', wanted a valid integer")
    assert problems(tree=3)[0].startswith("tree: got 3, wanted a valid dictionary")
    assert problems(engine=["tp_size"])[0].startswith("engine: got ['tp_size'], wanted")


def test_faulty_resources_do_not_spoil_what_is_right_on_a_gpu() -> None:
    gpu = {"device": "cuda", "cpus_per_rank": 9999}
    (problem,) = problems(resources=gpu, engine={"attention_backend": "overstory"})
    assert problem.startswith("resources.cpus_per_rank: got 9999")


def test_missing_model() -> None:
    with pytest.raises(SpecError, match="model: is missing"):
        parse_spec({"drafter": "x"})


def test_missing_drafter_needs_budget_zero() -> None:
    assert "set tree.budget: 0" in problems(drafter=None)[0]
    assert problems(drafter="")[0].startswith("drafter: got ''")
    assert parse_spec({**GOOD, "drafter": None, "tree": {"budget": 0}}).drafter is None


def test_gpu_share_on_a_cpu_is_refused() -> None:
    assert "set device: cuda" in problems(resources={"gpus_per_rank": 0.5})[0]
    share = {"device": "cuda", "gpus_per_rank": 0.5}
    assert parse_spec({**GOOD, "resources": share}).resources.gpus == 0.5
    assert parse_spec({**GOOD, "resources": {"device": "cuda"}}).resources.gpus == 1


@pytest.mark.parametrize("name", ["", "A", "a_b", "-a", "a" * 41])
def test_names_that_ray_would_choke_on(name: str) -> None:
    assert problems(name=name)[0].startswith("name: got")


def test_overrides_are_laid_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "d.yaml"
    file.write_text("model: overstory-tiny\ndrafter: d\ntree: {budget: 31, spine_first: true}\n")
    spec = load_spec(file, ["tree.budget=15", "engine.tp_size=2", "name=other"])
    assert (spec.tree.budget, spec.tree.spine_first, spec.tp_size) == (15, True, 2)
    assert spec.name == "other"
    assert load_spec(file, {"tree.budget": 7}).tree.budget == 7


def test_override_without_value(tmp_path: Path) -> None:
    file = tmp_path / "d.yaml"
    file.write_text("model: overstory-tiny\n")
    with pytest.raises(SpecError, match="wanted KEY=VALUE"):
        load_spec(file, ["tree.budget"])
    with pytest.raises(SpecError, match="not a section"):
        load_spec(file, ["model.x=1"])


def test_relative_model_paths_start_at_the_file(tmp_path: Path) -> None:
    file = tmp_path / "d.yaml"
    file.write_text("model: ./target\ndrafter: ../drafter\n")
    spec = load_spec(file)
    assert spec.model == str(tmp_path / "target")
    assert spec.drafter == str(tmp_path.parent / "drafter")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("- a\n", "got list"),
        ("model: [\n", "is not valid YAML"),
        ("just words", "got str"),
        ("model: x\nname: n\nmodel: y\n", "model is given twice; keep one(.|\n)*line 3"),
        ("model: x\ntree: {budget: 3, budget: 4}", "budget is given twice"),
        ("model: 2026-13-01\n", "a value cannot be read: month must be in 1..12"),
        ("[" * 1000, "is nested too deeply"),
    ],
)
def test_files_that_hold_no_deployment(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "d.yaml"
    file.write_text(text)
    with pytest.raises(SpecError, match=said):
        load_spec(file)


def test_keys_that_are_merged_in_may_be_given_again(tmp_path: Path) -> None:
    file = tmp_path / "d.yaml"
    text = "model: m\ntree: {<<: {budget: 3, spine_first: false}, budget: 0}\n"
    file.write_text(text)
    assert load_spec(file).tree.budget == 0


def test_an_override_that_is_no_yaml() -> None:
    with pytest.raises(SpecError, match=r"--set engine\.tp_size: is not valid YAML"):
        parse_override("engine.tp_size=[1")


def test_missing_file() -> None:
    with pytest.raises(SpecError, match=r"/nowhere/d\.yaml: cannot be read \(No such file"):
        load_spec("/nowhere/d.yaml")


SHIPPED = sorted((Path(__file__).parents[2] / "clusters").glob("*/deployment*.yaml"))


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_shipped_deployments_load(file: Path) -> None:
    load_spec(file)


def test_there_are_shipped_deployments() -> None:
    assert "local" in {file.parent.name for file in SHIPPED}
