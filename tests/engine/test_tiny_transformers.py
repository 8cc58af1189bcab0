"""The target in transformers: same weights, same logits."""

import pytest
import torch

from overstory.workers.tiny.oracle import Oracle
from overstory.workers.tiny.paths import resolve_model
from overstory.workers.tiny.prompts import heldout_prompts


def test_transformers_gives_the_same_logits() -> None:
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        resolve_model("overstory-tiny"), dtype=torch.float32
    ).eval()
    ids = list(heldout_prompts()[2].ids)[:64]
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(Oracle.load().logits(ids), theirs, atol=1e-3, rtol=1e-4)


def test_chat_template_frames_a_conversation() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(resolve_model("overstory-tiny"))
    messages = [
        {"role": "user", "content": "def f("},
        {"role": "assistant", "content": "x):"},
        {"role": "user", "content": "class A:"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|bos|><|user|>def f(<|assistant|>x):<|eos|><|user|>class A:<|assistant|>"
    ids = tokenizer(text)["input_ids"]
    assert ids[:2] == [0, 3]
    assert ids[-1] == 4
