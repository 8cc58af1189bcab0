"""What the command line asks the endpoint, against a small one that speaks the same protocol."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from overstory.orchestrator import client
from overstory.orchestrator.bench_load import Load
from overstory.orchestrator.bench_rows import BenchError
from overstory.orchestrator.client import EndpointError, Event
from overstory.orchestrator.generate import generate
from overstory.orchestrator.state import DeploymentRecord


class Handler(BaseHTTPRequestHandler):
    """Streams a chunk for each token, its number as text; prompt `fail` ends in an error."""

    asked: list[dict[str, Any]]

    def log_message(self, *_: Any) -> None:
        pass

    def _json(self, status: int, body: Any) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._json(200, {"data": [{"id": "tiny"}]})
        elif self.path == "/page/v1/models":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>")
        elif self.path == "/other/v1/models":
            self._json(200, {"models": []})
        else:
            self._json(503, {"error": {"message": "Not ready: still loading"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append({"path": self.path, **body})
        if body["model"] != "tiny":
            return self._json(404, {"error": {"message": f"no model {body['model']}"}})
        self.send_response(200)
        self.end_headers()
        chat = "chat" in self.path
        for number in range(body["max_tokens"]):
            piece = {"delta": {"content": f"{number} "}} if chat else {"text": f"{number} "}
            self._event({"choices": [piece]})
        if body.get("prompt") == "gone":
            return None  # The server dies: its stream ends here.
        if body.get("prompt") == "fail":
            return self._event({"error": {"message": "the replica was lost"}})
        self._event({"choices": [{"text": "", "delta": {}, "finish_reason": "length"}]})
        usage = {"completion_tokens": body["max_tokens"] - (body.get("prompt") == "short")}
        self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")
        return None

    def _event(self, chunk: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")


@pytest.fixture
def endpoint() -> Iterator[str]:
    Handler.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def record(endpoint: str) -> DeploymentRecord:
    return DeploymentRecord("d", endpoint, "a:1", {"served_model_name": "tiny"})


def test_pieces_come_with_usage_at_the_end(endpoint: str) -> None:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 2}
    events = list(client.stream_completion(endpoint, body))
    assert events == [
        Event("0 "),
        Event("1 "),
        Event("", "length"),
        Event("", None, {"completion_tokens": 2}),
    ]
    assert Handler.asked[0]["stream_options"] == {"include_usage": True}


def test_generate_prints_text_and_speed(endpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    generate("x", {"max_tokens": 3, "temperature": 0.0}, None, endpoint, chat=False)
    out, err = capsys.readouterr()
    assert out == "0 1 2 \n"
    assert "[3 tokens in " in err
    assert Handler.asked[0]["model"] == "tiny"  # The served one, as none was named.


def test_generate_as_chat(endpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    generate("hello", {"max_tokens": 1}, None, endpoint, chat=True)
    assert capsys.readouterr().out == "0 \n"
    assert Handler.asked[0]["path"] == "/v1/chat/completions"
    assert Handler.asked[0]["messages"] == [{"role": "user", "content": "hello"}]


def test_refusals_carry_the_endpoints_words(endpoint: str) -> None:
    with pytest.raises(EndpointError, match="no model other") as caught:
        list(client.stream_completion(endpoint, {"model": "other"}))
    assert caught.value.status == 404


def test_an_error_in_the_stream_is_an_error(endpoint: str) -> None:
    body = {"model": "tiny", "prompt": "fail", "max_tokens": 1}
    with pytest.raises(EndpointError, match="the replica was lost"):
        list(client.stream_completion(endpoint, body))


def test_a_stream_that_breaks_off_is_an_error(
    endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(EndpointError, match="broke off"):
        generate("gone", {"max_tokens": 2}, None, endpoint, chat=False)
    assert capsys.readouterr().out == "0 1 "


def test_what_is_no_endpoint_is_told(endpoint: str) -> None:
    for url, said in (
        ("127.0.0.1:8000", "--endpoint: got '127.0.0.1:8000', wanted http://HOST:PORT"),
        ("http://[::1", "does not answer as an OpenAI endpoint"),
        (f"{endpoint}/page", "does not answer as an OpenAI endpoint: JSONDecodeError"),
        (f"{endpoint}/other", "does not name a model: no OpenAI endpoint"),
    ):
        with pytest.raises(EndpointError) as caught:
            generate("x", {"max_tokens": 1}, None, url, chat=False)
        assert said in str(caught.value)


def test_ready_says_why_not(endpoint: str) -> None:
    assert client.ready(endpoint) == (False, "Not ready: still loading")
    answer, reason = client.ready("http://127.0.0.1:9", 1.0)
    assert not answer
    assert "does not answer" in reason


def test_load_sends_every_prompt_with_its_own_seed(endpoint: str) -> None:
    answers = Load(record(endpoint), ["a", "b", "c"]).run(4, 2, 0.7)
    assert [answer.tokens for answer in answers] == [4, 4, 4]
    assert sorted(asked["seed"] for asked in Handler.asked) == [0, 1, 2]
    assert {asked["temperature"] for asked in Handler.asked} == {0.7}
    assert all(asked["ignore_eos"] for asked in Handler.asked)


def test_a_short_answer_spoils_the_measurement(endpoint: str) -> None:
    with pytest.raises(BenchError, match="prompt 0: got 3 tokens, wanted 4"):
        Load(record(endpoint), ["short"]).run(4, 1, 0.0)
