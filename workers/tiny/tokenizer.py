"""Training and writing the byte-level BPE tokenizer of the built-in pair."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from .config import ASSISTANT, BOS, EOS, MASK, MAX_POSITIONS, SPECIAL_TOKENS, USER, TargetConfig

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}{{ eos_token }}"
    "{% else %}<|user|>{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Only a frame: the model was trained on source code and has seen no conversation."""


MAX_TOKEN_BYTES = 8
"""Short tokens on purpose: a small model then predicts several at a time about as well as a large
model does its longer ones, so that speculation behaves as it does in earnest."""


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Learn a byte-level BPE vocabulary of the target's size; special tokens take ids 0 to 4.

    Punctuation marks and digits are tokens of their own; no token exceeds `MAX_TOKEN_BYTES`.
    """
    tokenizer = Tokenizer(models.BPE(cache_capacity=1_000_000))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation("isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TargetConfig().vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=MAX_TOKEN_BYTES,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == TargetConfig().vocab_size, "too little text for the size"
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json`, its configuration and the chat template into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_POSITIONS,
        "bos_token": SPECIAL_TOKENS[BOS],
        "eos_token": SPECIAL_TOKENS[EOS],
        "mask_token": SPECIAL_TOKENS[MASK],
        "additional_special_tokens": [SPECIAL_TOKENS[USER], SPECIAL_TOKENS[ASSISTANT]],
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
