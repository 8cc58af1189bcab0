"""Every check against facts that are right, and against facts with one fault."""

import json
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from overstory.orchestrator import doctor
from overstory.orchestrator.cli import app
from overstory.orchestrator.doctor import (
    Diagnosis,
    Listener,
    inventory,
    missing_nodes,
    reach,
    wanted,
)
from overstory.orchestrator.doctor_checks import (
    CHECKS,
    GIB,
    MIB,
    Facts,
    Finding,
    LinkFacts,
    Wanted,
    findings,
)
from overstory.orchestrator.doctor_text import render_diagnosis
from overstory.orchestrator.node_facts import (
    GpuSeen,
    Interface,
    ModelSeen,
    NodeFacts,
    look_at_model,
    look_here,
    parse_gpus,
    parse_matrix,
    why_port_taken,
)
from overstory.orchestrator.spec import load_spec
from overstory.workers.tiny.paths import resolve_model

ROOT = Path(__file__).parents[2]
VERSIONS = {"overstory": "0.1.0", "ray": "2.60.0", "sglang": "0.5.17", "torch": "2.11.0"}
GPU = GpuSeen("NVIDIA RTX PRO 6000 Blackwell", 95.6 * GIB, (12, 0), 16, 16)
PAIRS = [f"{a}-{b}" for a in range(8) for b in range(a + 1, 8)]


def node(number: int = 1, **changes: Any) -> NodeFacts:
    address = f"10.0.0.{number}"
    healthy = NodeFacts(
        name=f"n{number}",
        address=address,
        head=number == 1,
        python="3.11.9",
        packages=VERSIONS,
        driver="580.95.05",
        gpus=(GPU,) * 8,
        peer=dict.fromkeys(PAIRS, "OK"),
        topology=dict.fromkeys(PAIRS, "PIX"),
        cpus=64,
        memory=512 * GIB,
        memory_free=500 * GIB,
        shm=256 * GIB,
        shm_free=250 * GIB,
        open_files=65536,
        locked_memory=-1,
        interfaces=(Interface("lo", ("127.0.0.1",)), Interface("eth0", (address,))),
        models=(ModelSeen("model", "/models/k", True, "abc", 64, 10**11),),
        builds_kernels=True,
    )
    return replace(healthy, **changes)


def link(source: int, target: int, **changes: Any) -> LinkFacts:
    good = LinkFacts(f"n{source}", f"n{target}", f"10.0.0.{target}", 1e-4, f"10.0.0.{source}", 5e9)
    return replace(good, **changes)


WANTED = Wanted("cuda", 16, 60 * GIB, True, "0.5.17")


def facts(
    first: dict[str, Any] | None = None,
    second: dict[str, Any] | None = None,
    links: tuple[LinkFacts, ...] = (link(1, 2), link(2, 1)),
    asked: Wanted = WANTED,
) -> Facts:
    return Facts((node(1, **(first or {})), node(2, **(second or {}))), links, asked)


def only(found: list[Finding]) -> Finding:
    assert len(found) == 1, [f"{f.check} {f.node}: {f.found}" for f in found]
    return found[0]


def test_healthy_nodes_have_nothing() -> None:
    assert findings(facts()) == []


# One fault each: what is changed, then check, severity, node, what is said.
SECOND_CHANGED: list[tuple[dict[str, Any], str, str, str]] = [
    ({"packages": {**VERSIONS, "ray": "2.59.0"}}, "packages", "error", "ray 2.59.0, the others"),
    ({"packages": {**VERSIONS, "torch": ""}}, "packages", "error", "torch is not installed"),
    ({"driver": "590.10"}, "driver", "warning", "driver 590.10, the others have 580"),
    (
        {"peer": {**dict.fromkeys(PAIRS, "OK"), "2-3": "CNS"}},
        "pcie",
        "warning",
        "(CNS; first: 2-3)",
    ),
    ({"topology": dict.fromkeys(PAIRS, "SYS")}, "pcie", "warning", "28 pairs of GPUs are on"),
    ({"memory_free": 10 * GIB}, "memory", "error", "10.0 GiB free, ranks there take about 60"),
    ({"shm_free": 64 * MIB, "shm": 64 * MIB}, "shm", "error", "64 of 64 MiB free"),
    ({"shm_free": 512 * MIB}, "shm", "warning", "512 of"),
    ({"open_files": 512}, "limits", "error", "512 open files"),
    ({"open_files": 20000}, "limits", "warning", "20000 open files"),
    ({"locked_memory": 8 * 2**20}, "limits", "warning", "limited to 8 MiB"),
    ({"clock_offset": 5.0, "clock_uncertain": 0.01}, "clock", "error", "+5.00 s off"),
    ({"clock_offset": -0.3, "clock_uncertain": 0.01}, "clock", "warning", "-0.30 s off"),
    ({"builds_kernels": False}, "kernels", "warning", "no nvcc"),
    ({"taken_ports": {8000: "Address already in use"}}, "ports", "error", "port 8000"),
    ({"models": (ModelSeen("model", "/models/k", False),)}, "models", "error", "no /models/k/"),
    ({"environment": {"CUDA_VISIBLE_DEVICES": "0,1"}}, "environment", "warning", "hides some of 8"),
    ({"environment": {"NCCL_P2P_DISABLE": "1"}}, "environment", "warning", "through host memory"),
    ({"environment": {"NCCL_SOCKET_IFNAME": "ib0"}}, "interfaces", "error", "IFNAME=ib0, but the"),
]


@pytest.mark.parametrize(("change", "check", "severity", "said"), SECOND_CHANGED)
def test_one_fault_is_found_and_nothing_else(
    change: dict[str, Any], check: str, severity: str, said: str
) -> None:
    found = only(findings(facts(second=change)))
    assert (found.check, found.severity, found.node) == (check, severity, "n2")
    assert said in found.found
    assert found.fix


def test_python_differs_in_the_patch_level() -> None:
    three = Facts((node(1), node(2), node(3, python="3.11.8")), (), WANTED)
    found = only(findings(three))
    assert (found.check, found.node) == ("python", "n3")
    assert "3.11.8, the others have 3.11.9" in found.found


def test_sglang_that_overstory_is_not_made_for() -> None:
    other = {"packages": {**VERSIONS, "sglang": "0.5.23"}}
    found = findings(facts(other, other))
    assert [f.found for f in found] == ["sglang 0.5.23, Overstory is made for 0.5.17"] * 2


def test_driver_too_old_for_cuda_13() -> None:
    old = {"driver": "570.86.10"}
    found = findings(facts(old, old))
    assert [(f.check, f.severity) for f in found] == [("driver", "error")] * 2


def test_too_few_gpus() -> None:
    found = only(findings(facts(second={"gpus": (GPU,) * 7})))
    assert found.found == "15 GPUs (n1 8, n2 7), the deployment needs 16"


def test_gpus_of_two_kinds() -> None:
    other = replace(GPU, name="NVIDIA H200", memory=140 * GIB, capability=(9, 0))
    found = only(findings(facts(second={"gpus": (GPU,) * 7 + (other,)})))
    assert "GPUs of several kinds: NVIDIA H200, 140 GiB" in found.found


def test_gpu_that_no_kernel_is_built_for() -> None:
    old = (replace(GPU, capability=(8, 0)),) * 8
    found = findings(facts({"gpus": old}, {"gpus": old}))
    assert all(
        "compute capability 8.0, kernels are built for 9.0 and 12.0" in f.found for f in found
    )
    assert len(found) == 2


def test_little_shared_memory_is_no_error_without_gpus() -> None:
    small = {"shm_free": 64 * MIB, "gpus": ()}
    found = only(findings(facts(small, {"gpus": ()}, asked=Wanted())))
    assert (found.check, found.severity) == ("shm", "warning")


def test_narrow_link() -> None:
    narrow = (replace(GPU, link_width=8), *(GPU,) * 7)
    assert "narrow links: GPU 0 x8 of x16" in only(findings(facts(second={"gpus": narrow}))).found


def test_sockets_apart_are_fine_where_nccl_is_told() -> None:
    apart = {
        "topology": dict.fromkeys(PAIRS, "SYS"),
        "environment": {"NCCL_P2P_LEVEL": "SYS"},
    }
    assert findings(facts(second=apart)) == []


def test_an_uncertain_clock_is_not_blamed() -> None:
    assert findings(facts(second={"clock_offset": 0.4, "clock_uncertain": 0.5})) == []


def test_ray_knows_a_node_by_its_loopback() -> None:
    found = [f for f in findings(facts(second={"address": "127.0.1.1"})) if f.check == "interfaces"]
    assert "127.0.1.1, which the other nodes cannot reach" in only(found).found


def test_address_that_no_interface_has() -> None:
    here = (Interface("eth0", ("192.168.0.2",)),)
    assert (
        "none of its interfaces has 10.0.0.2"
        in only(findings(facts(second={"interfaces": here}))).found
    )


def test_two_networks_and_nobody_says_which() -> None:
    two = (Interface("eth0", ("10.0.0.2",)), Interface("ib0", ("10.1.0.2",)))
    found = only(findings(facts(second={"interfaces": two})))
    assert "several networks (eth0, ib0); ranks meet on eth0" in found.found
    one_node_replicas = replace(WANTED, over_nodes=False)
    assert findings(facts(second={"interfaces": two}, asked=one_node_replicas)) == []


def test_variable_names_another_network_than_ray() -> None:
    two = (Interface("eth0", ("10.0.0.2",)), Interface("ib0", ("10.1.0.2",)))
    named = {"interfaces": two, "environment": {"NCCL_SOCKET_IFNAME": "=ib0"}}
    assert (
        "NCCL_SOCKET_IFNAME=ib0, but Ray's address 10.0.0.2 is on eth0"
        in only(findings(facts(second=named))).found
    )
    down = (two[0], replace(two[1], up=False))
    assert "is down" in only(findings(facts(second={**named, "interfaces": down}))).found


def test_unreachable_node() -> None:
    cut = link(1, 2, seconds=None, reason="No route to host")
    found = only(findings(facts(links=(cut, link(2, 1)))))
    assert found.severity == "error"
    assert found.found == "n1 -> n2 at 10.0.0.2: No route to host"


def test_traffic_takes_the_wrong_interface() -> None:
    found = only(findings(facts(links=(link(1, 2, seen_as="10.1.0.1"), link(2, 1)))))
    assert "arrives from 10.1.0.1, Ray knows n1 as 10.0.0.1" in found.found


@pytest.mark.parametrize(
    ("change", "said"), [({"seconds": 0.02}, "20.0 ms"), ({"rate": 1.1e8}, "0.11 GB/s")]
)
def test_slow_network(change: dict[str, float], said: str) -> None:
    assert said in only(findings(facts(links=(link(1, 2, **change),)))).found


def test_models_that_differ() -> None:
    torn = (ModelSeen("model", "/models/k", True, "xyz", 64, 10**11),)
    three = Facts((node(1), node(2), node(3, models=torn)), (), WANTED)
    found = only(findings(three))
    assert (found.node, found.check) == ("n3", "models")
    assert "its files differ" in found.found
    empty = (ModelSeen("model", "/models/k", True, "abc", 0, 0),)
    assert "no *.safetensors" in only(findings(facts(second={"models": empty}))).found


def test_no_check_that_cannot_find() -> None:
    faulty = [facts(second=change) for change, *_ in SECOND_CHANGED]
    faulty.append(facts(second={"python": "3.11.8"}, links=(link(1, 2, seconds=None),)))
    faulty.append(facts(second={"gpus": ()}))
    silent = [check.__name__ for check in CHECKS if not any(list(check(f)) for f in faulty)]
    assert silent == []


def test_the_page_names_every_check() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text()
    faulty = [facts(second=change) for change, *_ in SECOND_CHANGED]
    names = {finding.check for each in faulty for finding in findings(each)}
    names |= {check.__name__.removeprefix("check_") for check in CHECKS}
    assert [name for name in sorted(names) if f"\n| {name} |" not in page] == []


def test_a_node_that_cannot_be_looked_at() -> None:
    dead = NodeFacts("n2", "10.0.0.2", fault="cannot be looked at: No module named 'overstory'")
    found = only(findings(Facts((node(1), dead), (), replace(WANTED, gpus=8))))
    assert (found.check, found.severity, found.node) == ("look", "error", "n2")


def test_nodes_that_have_not_joined() -> None:
    assert missing_nodes(2, 2) == missing_nodes(0, 1) == []
    found = only(missing_nodes(3, 1))
    assert found.found == "1 node in the cluster, 3 expected"
    assert "RAY_UP_enable_autoscaler_v2=0" in found.fix


def test_errors_come_first() -> None:
    both = facts(first={"open_files": 20000}, second={"open_files": 100})
    assert [f.severity for f in findings(both)] == ["error", "warning"]


# ------------------------------------------------------------------------- collecting


def test_gpus_out_of_nvidia_smi() -> None:
    text = (
        "NVIDIA RTX PRO 6000 Blackwell Server Edition, 97887, 12.0, 580.95.05, 8, 16\n"
        "NVIDIA H200, 143771, 9.0, 580.95.05, [N/A], [N/A]\n\nnonsense\n"
    )
    gpus, driver = parse_gpus(text)
    assert driver == "580.95.05"
    assert gpus[0].capability == (12, 0)
    assert (gpus[0].link_width, gpus[0].link_width_max) == (8, 16)
    assert (gpus[1].memory, gpus[1].link_width) == (143771 * MIB, 0)


def test_topology_matrix() -> None:
    text = (
        "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m\n"
        "GPU0\t X \tPIX\tSYS\tNODE\t0-31\n"
        "GPU1\tPIX\t X \tSYS\tNODE\t0-31\n"
        "GPU2\tSYS\tSYS\t X \tSYS\t32-63\n"
        "NIC0\tNODE\tNODE\tSYS\t X \n\nLegend:\n  X    = Self\n"
    )
    matrix = {k: v for k, v in parse_matrix(text).items() if int(k.split("-")[1]) < 3}
    assert matrix == {"0-1": "PIX", "0-2": "SYS", "1-2": "SYS"}


def test_this_machine(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as held:
        taken = held.getsockname()[1]
        model = resolve_model("overstory-tiny")
        seen = look_here("127.0.0.1", True, [("model", model), ("drafter", "/nowhere")], [taken])
    assert seen.packages["sglang"] == "0.5.17"
    assert seen.memory > seen.memory_free > 0
    assert any("127.0.0.1" in interface.addresses for interface in seen.interfaces)
    assert "in use" in seen.taken_ports[taken]
    here, missing = seen.models
    assert here.present
    assert here.weight_files >= 1
    assert not missing.present
    assert why_port_taken(0) is None


def test_a_models_digest_follows_its_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "a.safetensors").write_bytes(b"x" * 100)
    first = look_at_model("model", str(tmp_path))
    assert (first.weight_files, first.weight_bytes) == (1, 100)
    (tmp_path / "a.safetensors").write_bytes(b"x" * 99 + b"y")
    assert look_at_model("model", str(tmp_path)).digest != first.digest


def test_a_way_between_processes_is_tried() -> None:
    listener = Listener()
    seen = reach("a", "b", "127.0.0.1", listener.port)
    assert seen.seconds is not None
    assert 0 < seen.seconds < 1
    assert seen.seen_as == "127.0.0.1"
    assert seen.rate > 1e6
    port = listener.port
    listener.close()
    gone = reach("a", "b", "127.0.0.1", port)
    assert gone.seconds is None
    assert gone.reason


def test_wants_come_from_the_plan() -> None:
    spec = load_spec(ROOT / "clusters" / "rtx-pro-6000-2x8" / "deployment-tp16.yaml")
    asked, faults = wanted(spec, (node(1), node(2)))
    assert faults == []
    assert (asked.gpus, asked.over_nodes) == (16, True)
    assert asked.memory > 8 * 6 * GIB
    assert inventory((node(1),))[0].gpu_memory == GPU.memory
    small = (replace(GPU, memory=40 * GIB),) * 8
    _, faults = wanted(spec, (node(1, gpus=small), node(2, gpus=small)))
    assert only(faults).check == "plan"


def test_diagnosis_as_text() -> None:
    seen = facts(second={"open_files": 512})
    text = render_diagnosis(Diagnosis(seen, tuple(findings(seen)), "Ray at x"))
    for part in (
        "n1 (10.0.0.1, head)",
        "8 GPUs (NVIDIA RTX PRO 6000 Blackwell), driver 580.95.05",
        "n1 -> n2: 0.10 ms there and back, 5.00 GB/s",
        "error: limits n2: 512 open files a process",
        "  fix: run `ulimit -n 65536` before `ray start`",
        "1 error, 0 warnings",
    ):
        assert part in text


@pytest.fixture
def diagnosed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Facts], None]:
    def put(seen: Facts) -> None:
        diagnosis = Diagnosis(seen, tuple(findings(seen)), "Ray at x")
        monkeypatch.setattr(doctor, "diagnose", lambda *_: diagnosis)

    return put


def test_exit_codes(diagnosed: Callable[[Facts], None]) -> None:
    run = CliRunner()
    diagnosed(facts())
    assert run.invoke(app, ["doctor", "--strict"]).exit_code == 0
    diagnosed(facts(second={"open_files": 20000}))
    assert run.invoke(app, ["doctor"]).exit_code == 0
    assert run.invoke(app, ["doctor", "--strict"]).exit_code == 1
    diagnosed(facts(second={"open_files": 512}))
    done = run.invoke(app, ["doctor", "--json"])
    assert done.exit_code == 1
    said = json.loads(done.stdout)
    assert said["errors"] == 1
    assert said["findings"][0]["fix"]
    assert said["nodes"][1]["address"] == "10.0.0.2"
