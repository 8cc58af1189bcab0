"""Where the commands look for the endpoint: it listens on the head node, they may run elsewhere."""

import pytest

from overstory.orchestrator.deploy import DeployError, endpoint_of
from overstory.orchestrator.spec import GatewaySpec


@pytest.mark.parametrize(
    ("host", "head", "url"),
    [
        ("127.0.0.1", None, "http://127.0.0.1:8000"),
        ("0.0.0.0", None, "http://127.0.0.1:8000"),
        ("::", None, "http://[::1]:8000"),
        ("192.0.2.7", None, "http://192.0.2.7:8000"),
        ("192.0.2.7", "192.0.2.7", "http://192.0.2.7:8000"),
        ("0.0.0.0", "192.0.2.7", "http://192.0.2.7:8000"),
        ("::", "2001:db8::7", "http://[2001:db8::7]:8000"),
        ("2001:db8::7", "2001:db8::7", "http://[2001:db8::7]:8000"),
    ],
)
def test_url_from_here(host: str, head: str | None, url: str) -> None:
    assert endpoint_of(GatewaySpec(host=host), head) == url


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_the_loopback_of_another_machine_is_refused(host: str) -> None:
    with pytest.raises(DeployError, match=r"gateway\.host: .*head node 192\.0\.2\.7.*0\.0\.0\.0"):
        endpoint_of(GatewaySpec(host=host), "192.0.2.7")
