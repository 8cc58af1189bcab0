"""What is sent off for a step's requests is, field by field, what SGLang would send."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

MORE_THAN_TOKENS: tuple[dict[str, Any], ...] = (
    {},
    {"stream": False},
    {"stream_interval": 2},
    {"stop_strs": ["x"]},
    {"finished": True},
    {"finished_before": True},
    {"return_hidden_states": True, "hidden_states": [[0.5]]},
    {"mm_image_tokens": 3},
    {"customized_info": {"k": [1] * 40}},
    {"is_retracted": True},
    {"cached_tokens_device": 3, "cached_tokens_host": 1},
    {"new": True},
)


class _Decodes:
    """Texts without an x."""

    def decode(self, ids: Any) -> str:
        return "." * len(ids)


def _request(number: int, draw: random.Random, more: dict[str, Any]) -> Any:
    from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(max_new_tokens=90, skip_special_tokens=draw.random() < 0.5)
    params.stop_strs = more.get("stop_strs", [])
    params.stop_regex_strs, params.stop_str_max_len, params.stop_regex_max_len = [], 1, 0
    params.stream_interval = more.get("stream_interval")
    prompt = array("q", [draw.randrange(99) for _ in range(draw.randrange(1, 9))])
    req = Req(f"r{number}", "", prompt, params, vocab_size=99, stream=more.get("stream", True))
    req.tokenizer, req.time_stats = _Decodes(), f"times of {number}"  # type: ignore[assignment]
    for name in ("spec_verify_ct", "spec_num_correct_drafts", "reasoning_tokens", "cached_tokens"):
        setattr(req, name, draw.randrange(50))
    req.spec_correct_drafts_histogram = [draw.randrange(9) for _ in range(4)]
    req.retraction_count, req.decoded_text = draw.randrange(2), "." * draw.randrange(3)
    req.http_worker_ipc = draw.choice([None, "ipc"])
    for name, value in more.items():
        if name in ("finished", "finished_before"):
            req.finished_reason = FINISH_LENGTH(3)
            req.finished_len, req.finished_output = 3, name == "finished_before"
        elif name not in ("stream", "stream_interval", "stop_strs", "new"):
            setattr(req, name, value)
    return req


def _streamer(sent: list[Any], algorithm: str) -> Any:
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    return SchedulerOutputStreamer(
        send_to_detokenizer=SimpleNamespace(send_output=sent.append),  # type: ignore[arg-type]
        tree_cache=SimpleNamespace(),  # type: ignore[arg-type]
        ps=SimpleNamespace(dp_rank=0, attn_tp_rank=1),  # type: ignore[arg-type]
        server_args=SimpleNamespace(),  # type: ignore[arg-type]
        is_generation=True,
        spec_algorithm=SpeculativeAlgorithm.from_string(algorithm),
        disaggregation_mode=None,  # type: ignore[arg-type]
        enable_hicache_storage=lambda: False,
    )


_OF_A_REQUEST = (
    "send_token_offset",
    "send_decode_id_offset",
    "cur_decode_ids_len",
    "surr_and_decode_ids",
    "surr_offset",
    "read_offset",
    "finished_output",
    "finished_len",
)


def _sent(seed: int, ours: bool, taken: list[int], algorithm: str = "DDTREE") -> list[Any]:
    """What leaves in some steps of some requests, and where these stand after each."""
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

    from overstory.workers.ddtree import lean_stream

    original: Any = SchedulerOutputStreamer._stream_output_generation
    while hasattr(original, "__wrapped__"):
        original = original.__wrapped__

    def theirs(*arguments: Any) -> None:
        taken.append(seed)
        original(*arguments)

    draw, found = random.Random(seed), []
    odd = MORE_THAN_TOKENS[seed % len(MORE_THAN_TOKENS)]
    count = draw.randrange(1, 5)
    reqs = [_request(i, draw, odd if i == count - 1 else {}) for i in range(count)]
    sent: list[Any] = []
    streamer = _streamer(sent, algorithm)
    for _ in range(5):
        for req in reqs:
            if req.finished_reason is None:
                req.output_ids.extend(draw.randrange(99) for _ in range(draw.randrange(1, 8)))
        if ours:
            lean_stream.stream(theirs, streamer, reqs, False, None)
        else:
            original(streamer, reqs, False, None)
        found.append([{name: getattr(req, name, None) for name in _OF_A_REQUEST} for req in reqs])
    return [found, [msgspec.structs.asdict(payload) for payload in sent]]


@pytest.fixture(autouse=True)
def _intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers.scheduler_components import output_streamer

    from overstory.workers.ddtree import lean_stream

    for module in (output_streamer, lean_stream):
        monkeypatch.setattr(module, "get_serving", lambda: SimpleNamespace(stream_interval=1))


@pytest.mark.usefixtures("_plugin")
@pytest.mark.parametrize(
    "odd", range(len(MORE_THAN_TOKENS)), ids=lambda i: str(MORE_THAN_TOKENS[i])
)
def test_all_that_is_sent_is_what_sglang_sends(odd: int) -> None:
    """First tokens, the middle of texts, ends; requests that ask for more than tokens."""
    short = 0
    for round_ in range(40):
        seed = odd + round_ * len(MORE_THAN_TOKENS)
        taken: list[int] = []
        assert _sent(seed, True, taken) == _sent(seed, False, [])
        short += len(taken) < 5
        assert taken, "first tokens are SGLang's to send"
    middle = odd in (0, 9, 10, 11)
    assert short == (40 if middle else 0)


@pytest.mark.usefixtures("_plugin")
def test_engines_without_speculation_send_what_sglang_sends() -> None:
    """Lists that speak of drafts are empty there."""
    for seed in range(40):
        assert _sent(seed, True, [], "NONE") == _sent(seed, False, [], "NONE")


@pytest.fixture
def _plugin() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
