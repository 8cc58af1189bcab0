import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from overstory.orchestrator.token_text import TokenText, token_text
from overstory.orchestrator.tokenizer import ChatTemplateError, FileTokenizer, load_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('system comes first') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ extra | default('') }}"
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: index for index, char in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|bos|>"])
    bos = tokenizer.token_to_id("<|bos|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", bos)]
    )
    tokenizer.enable_truncation(4)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    _configure(tmp_path, chat_template=TEMPLATE, bos_token="<|bos|>")
    return tmp_path


def _configure(folder: Path, **config: object) -> None:
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config})
    )


def test_text_survives_and_special_tokens_do_not_show(model: Path) -> None:
    tokenizer = load_tokenizer(str(model))
    assert isinstance(tokenizer, FileTokenizer)
    ids = tokenizer.encode("héllo wörld, longer than the file's truncation")
    assert ids[0] == 256
    assert tokenizer.decode(ids) == "héllo wörld, longer than the file's truncation"
    assert tokenizer.encode("x", special=False) == tokenizer.encode("x")[1:]
    assert (tokenizer.vocab_size, tokenizer.max_token_chars) == (257, len("<|bos|>"))


def test_chat_is_rendered_as_transformers_does(model: Path) -> None:
    tokenizer = load_tokenizer(str(model))
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.render_chat(messages) == "<|bos|><user>hi<assistant>"
    assert tokenizer.render_chat(messages, extra="!") == "<|bos|><user>hi<assistant>!"


def test_a_template_in_a_file_wins(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ messages | length }}")
    assert load_tokenizer(str(model)).render_chat([{"role": "user", "content": "x"}]) == "1"


def test_messages_that_the_template_refuses_and_a_missing_template_are_told(model: Path) -> None:
    tokenizer = load_tokenizer(str(model))
    turns = [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]
    with pytest.raises(ChatTemplateError, match="system comes first"):
        tokenizer.render_chat(turns)
    _configure(model)
    with pytest.raises(ChatTemplateError, match="/v1/completions"):
        load_tokenizer(str(model)).render_chat(turns)


def test_a_template_cannot_reach_out_of_its_sandbox(model: Path) -> None:
    _configure(model, chat_template="{{ messages.__class__.__mro__ }}")
    with pytest.raises(ChatTemplateError):
        load_tokenizer(str(model)).render_chat([{"role": "user", "content": "x"}])


def test_single_tokens_are_named_by_text_or_by_their_bytes(model: Path) -> None:
    """The vocabulary has the bytes alone: all but ASCII needs several tokens."""
    tokenizer = load_tokenizer(str(model))
    assert isinstance(tokenizer, FileTokenizer)
    ids = tokenizer.encode(" a\u20ac", special=False)
    named = [tokenizer.token(token) for token in ids]
    assert [name.text for name in named] == [
        " ", "a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"
    ]  # fmt: skip
    assert b"".join(name.raw or b"?" for name in named).decode() == " a\u20ac"
    assert tokenizer.token(tokenizer.vocab_size - 1).text == "<|bos|>"
    assert tokenizer.token(tokenizer.vocab_size + 7).raw is None


@pytest.mark.parametrize(
    ("piece", "decoded", "text", "raw"),
    [
        ("\u2581the", "the", " the", b" the"),
        ("\u2581the", " the", " the", b" the"),
        ("<0xE2>", "\ufffd", "bytes:\\xe2", b"\xe2"),
        ("\ufffd", "\ufffd", "\ufffd", None),
        ("\u00ef\u00bf\u00bd", "\ufffd", "\ufffd", "\ufffd".encode()),
        ("x", "x", "x", b"x"),
    ],
)
def test_tokens_of_other_vocabularies(
    piece: str, decoded: str, text: str, raw: bytes | None
) -> None:
    assert token_text(piece, lambda: decoded) == TokenText(text, raw)
