"""Where ranks on several nodes meet: at the address by which Ray knows their node."""

import pytest

from overstory.workers import interfaces
from overstory.workers.interfaces import (
    GLOO,
    NCCL,
    SGLANG,
    addresses_by_interface,
    is_loopback,
    meet_nccl_over_network,
    meet_over_network,
    meeting_environment,
)

INTERFACES = {
    "lo": ["127.0.0.1", "::1"],
    "eth0": ["192.0.2.7", "fe80::1"],
    "ib0": ["198.51.100.7", "2001:db8::7"],
}


@pytest.mark.parametrize(
    ("address", "name"), [("192.0.2.7", "eth0"), ("198.51.100.7", "ib0"), ("2001:db8::7", "ib0")]
)
def test_the_interface_that_has_the_node_s_address(address: str, name: str) -> None:
    found = meeting_environment(address, INTERFACES, {})
    assert found == {GLOO: name, NCCL: f"={name}", SGLANG: address}


def test_what_the_user_set_stands() -> None:
    mine = {GLOO: "ib0", SGLANG: "198.51.100.7"}
    assert meeting_environment("192.0.2.7", INTERFACES, mine) == {NCCL: "=eth0"}
    everything = {GLOO: "ib0", NCCL: "ib0", SGLANG: "198.51.100.7"}
    assert meeting_environment("203.0.113.1", INTERFACES, everything) == {}, "behind a NAT"


def test_an_address_of_no_interface_is_refused() -> None:
    with pytest.raises(ValueError, match=r"203\.0\.113\.1.*eth0 192\.0\.2\.7.*node-ip-address"):
        meeting_environment("203.0.113.1", INTERFACES, {})


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1:5000", True),
        ("127.0.1.1", True),
        ("[::1]:5000", True),
        ("::1", True),
        ("192.0.2.7:5000", False),
        ("[2001:db8::7]:5000", False),
        ("2001:db8::7", False),
    ],
)
def test_loopback(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback


@pytest.mark.parametrize(
    ("address", "before", "after"),
    [
        ("192.0.2.7", {}, {NCCL: "=eth0"}),
        ("192.0.2.7", {GLOO: "ib0"}, {GLOO: "ib0", NCCL: "=eth0"}),
        ("192.0.2.7", {NCCL: "ib0"}, {NCCL: "ib0"}),
        ("127.0.0.1", {}, {}),
        ("203.0.113.1", {}, {}),
    ],
    ids=["named", "gloo's stands", "the user's stands", "loopback", "behind a NAT"],
)
def test_nccl_alone(
    monkeypatch: pytest.MonkeyPatch, address: str, before: dict[str, str], after: dict[str, str]
) -> None:
    monkeypatch.setattr(interfaces, "addresses_by_interface", lambda: INTERFACES)
    environ = dict(before)
    meet_nccl_over_network(address, environ)
    assert environ == after


def test_this_host_has_a_loopback() -> None:
    name = next(n for n, have in addresses_by_interface().items() if "127.0.0.1" in have)
    environ = {"PATH": "/bin"}
    meet_over_network("127.0.0.1", environ)
    assert environ == {"PATH": "/bin", GLOO: name, NCCL: f"={name}", SGLANG: "127.0.0.1"}
