"""The model's tokenizer and chat template, with light imports: a gateway starts in seconds.

A `tokenizer.json` is read with `tokenizers`, and the chat template is rendered with jinja2 as
transformers renders it. Only where a model needs transformers to be read rightly (a tokenizer
written in Python such as Kimi's, or a class that changes what `tokenizer.json` says) is
`AutoTokenizer` taken, which costs about 12 s and 0.8 GB.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from overstory.orchestrator.token_text import TokenText, token_text

_AS_THE_FILE_SAYS = {None, "PreTrainedTokenizerFast", "TokenizersBackend"}
"""Tokenizer classes that add nothing to `tokenizer.json`; Llama's, for one, adds a
beginning-of-text token."""

_NAMED_TOKENS = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip


class ChatTemplateError(ValueError):
    """The model has no chat template, or it refuses these messages."""


class Tokenizer(Protocol):
    """What the gateway needs of a tokenizer."""

    vocab_size: int
    """Ids are in [0, vocab_size)."""
    max_token_chars: int
    """No token stands for more characters than this."""

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Ids of `text`; `special` adds what the model wants around a plain prompt."""
        ...

    template: str | None
    """The chat template's source, if the model has one."""

    def vocabulary(self) -> Mapping[str, int]:
        """Tokens as the vocabulary spells them, to ids."""
        ...

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """Text of `ids`, with or without special tokens."""
        ...

    def token(self, token_id: int) -> TokenText:
        """What one token stands for, also a special one, and ids beyond the vocabulary."""
        ...

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt text of a conversation, up to where the assistant is to speak.

        Raises:
            ChatTemplateError: as the class says.
        """
        ...


def load_tokenizer(model_dir: str, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer of a model folder.

    Raises:
        ValueError: the folder holds no tokenizer that can be read.
    """
    folder = Path(model_dir)
    config = _read_json(folder / "tokenizer_config.json")
    file = folder / "tokenizer.json"
    light = (
        config.get("tokenizer_class") in _AS_THE_FILE_SAYS
        and "auto_map" not in config
        and not config.get("clean_up_tokenization_spaces")
    )
    if file.is_file() and light:
        return FileTokenizer(file, config, _chat_template(folder, config))
    return TransformersTokenizer(model_dir, trust_remote_code)


class FileTokenizer:
    """A `tokenizer.json` and a chat template."""

    def __init__(self, file: Path, config: Mapping[str, Any], chat_template: str | None) -> None:
        import tokenizers

        self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.max_token_chars = max(map(len, vocabulary))
        self.template = chat_template
        self._template = _compile(chat_template) if chat_template else None
        self._named = {
            name: _token_text(config[name]) for name in _NAMED_TOKENS if config.get(name)
        }

    def vocabulary(self) -> Mapping[str, int]:
        """See `Tokenizer.vocabulary`."""
        return dict(self._tokenizer.get_vocab(with_added_tokens=True))

    def encode(self, text: str, special: bool = True) -> list[int]:
        """See `Tokenizer.encode`."""
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """See `Tokenizer.decode`."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=not special))

    def token(self, token_id: int) -> TokenText:
        """See `Tokenizer.token`."""
        return token_text(
            self._tokenizer.id_to_token(token_id),
            lambda: str(self._tokenizer.decode([token_id], skip_special_tokens=False)),
        )

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """See `Tokenizer.render_chat`."""
        if self._template is None:
            raise ChatTemplateError("the model has no chat template; use /v1/completions")
        given = {"add_generation_prompt": True, **self._named, **variables}
        try:
            return str(self._template.render(messages=messages, **given))
        except Exception as error:  # Templates are programs, and take messages for granted.
            raise ChatTemplateError(f"the chat template refuses the messages: {error}") from error


class TransformersTokenizer:
    """A tokenizer that only transformers can read rightly."""

    def __init__(self, model_dir: str, trust_remote_code: bool) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(
                model_dir, trust_remote_code=trust_remote_code
            )
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"model {model_dir}: no tokenizer could be read: {error}") from error
        self.vocab_size = len(self._tokenizer)
        self.max_token_chars = max(map(len, self._tokenizer.get_vocab()))
        self.template = self._tokenizer.chat_template

    def vocabulary(self) -> Mapping[str, int]:
        """See `Tokenizer.vocabulary`."""
        return dict(self._tokenizer.get_vocab())

    def encode(self, text: str, special: bool = True) -> list[int]:
        """See `Tokenizer.encode`."""
        return list(self._tokenizer.encode(text, add_special_tokens=special))

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """See `Tokenizer.decode`."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=not special))

    def token(self, token_id: int) -> TokenText:
        """See `Tokenizer.token`."""
        known = 0 <= token_id < self.vocab_size
        return token_text(
            self._tokenizer.convert_ids_to_tokens(token_id) if known else None,
            lambda: str(self._tokenizer.decode([token_id], skip_special_tokens=False)),
        )

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """See `Tokenizer.render_chat`."""
        given = {"add_generation_prompt": True, **variables}
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **given))
        except Exception as error:  # Templates are programs, and take messages for granted.
            raise ChatTemplateError(f"the chat template refuses the messages: {error}") from error


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # older models: several named ones
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _compile(template: str) -> Any:
    """The template in transformers' environment (`transformers/utils/chat_template_utils.py`)."""
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def _token_text(token: Any) -> str:
    return str(token["content"] if isinstance(token, Mapping) else token)


def _read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
