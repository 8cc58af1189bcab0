"""The built-in pair as committed: its files, its oracle, and that the oracle is right."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from overstory.kernels.reference import ancestor_matrix, tree_build
from overstory.workers.tiny.config import BOS, EOS, MASK, DrafterConfig, TargetConfig
from overstory.workers.tiny.oracle import Oracle, Sampling, cut_at_end
from overstory.workers.tiny.paths import BUILT_IN, PAIR_FOLDER, resolve_model
from overstory.workers.tiny.prompts import PROMPT_TOKENS, Prompt, heldout_prompts
from overstory.workers.tiny.target import TargetCache

NEW = 48


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    torch.set_num_threads(1)
    return Oracle.load()


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return heldout_prompts()


def test_names_resolve_to_folders_that_exist() -> None:
    for name in BUILT_IN:
        assert (Path(resolve_model(name)) / "model.safetensors").is_file()
    assert resolve_model("/some/where") == "/some/where"


def test_pair_is_small() -> None:
    size = sum(f.stat().st_size for f in PAIR_FOLDER.parent.rglob("*") if f.is_file())
    assert size < 24e6


def test_configurations_are_those_of_the_code() -> None:
    target = json.loads((PAIR_FOLDER / "target" / "config.json").read_text())
    drafter = json.loads((PAIR_FOLDER / "drafter" / "config.json").read_text())
    assert target == TargetConfig.from_hf(target).to_hf()
    assert drafter == DrafterConfig.from_hf(drafter).to_hf()
    assert drafter["hidden_size"] == target["hidden_size"]
    assert drafter["vocab_size"] == target["vocab_size"]
    assert max(drafter["dflash_config"]["target_layer_ids"]) < target["num_hidden_layers"] - 1


def test_tokenizer_round_trips_any_text() -> None:
    tokenizer = Tokenizer.from_file(str(PAIR_FOLDER / "target" / "tokenizer.json"))
    ids = {"<|bos|>": BOS, "<|eos|>": EOS, "<|mask|>": MASK}
    assert {token: tokenizer.token_to_id(token) for token in ids} == ids
    for text in ("def f(x):\n\treturn x ** 2\n", "naïve — 漢字 🙂\r\n", " " * 9 + "#0042"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    same = (PAIR_FOLDER / "drafter" / "tokenizer.json").read_bytes()
    assert same == (PAIR_FOLDER / "target" / "tokenizer.json").read_bytes()


def test_prompts_are_text_of_the_tokenizer(prompts: list[Prompt]) -> None:
    tokenizer = Tokenizer.from_file(str(PAIR_FOLDER / "target" / "tokenizer.json"))
    assert len(prompts) >= 128
    assert len({prompt.ids for prompt in prompts}) == len(prompts)
    assert len({prompt.file for prompt in prompts[:32]}) > 20
    for prompt in prompts:
        assert len(prompt.ids) == PROMPT_TOKENS
        assert tokenizer.decode(list(prompt.ids)) == prompt.text


def test_plain_decoding_follows_the_logits(oracle: Oracle, prompts: list[Prompt]) -> None:
    prompt = list(prompts[0].ids)
    tokens = oracle.greedy(prompt, 12, ignore_eos=True)
    logits = oracle.logits(prompt + tokens)[len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == tokens


@pytest.mark.parametrize(
    ("nodes", "spine_first"),
    [
        pytest.param(7, True, marks=pytest.mark.full),
        pytest.param(8, False, marks=pytest.mark.full),
        (15, True),
        pytest.param(31, False, marks=pytest.mark.full),
    ],
)
def test_speculation_gives_plain_decoding(
    oracle: Oracle, prompts: list[Prompt], nodes: int, spine_first: bool
) -> None:
    kinds = (Sampling(), Sampling(temperature=1.0, seed=1, top_p=0.95))
    for prompt, sampling in zip(prompts, kinds, strict=False):
        ids = list(prompt.ids)
        plain = oracle.plain(ids, NEW, sampling)
        tree = oracle.tree(ids, NEW, nodes, spine_first, sampling)
        assert tree.tokens == plain.tokens
        assert 1 + sum(tree.gains[:-1]) < len(tree.tokens) <= 1 + sum(tree.gains)


def test_speculation_pays(oracle: Oracle, prompts: list[Prompt]) -> None:
    ids = [list(prompt.ids) for prompt in prompts[:2]]
    chain = sum(oracle.chain(some, NEW, ignore_eos=True).rounds for some in ids)
    tree = sum(oracle.tree(some, NEW, 31, ignore_eos=True).rounds for some in ids)
    assert tree < chain < len(ids) * (NEW - 1) / 2


def test_tree_rows_see_their_path_and_nothing_else(oracle: Oracle, prompts: list[Prompt]) -> None:
    """Each row's logits in one verify forward are those of its path run alone."""
    target, prompt = oracle.decoder.target, torch.tensor([prompts[1].ids])
    length = prompt.shape[1] - 1
    torch.manual_seed(0)
    marginals = torch.randn(1, 7, 8).log_softmax(-1).sort(-1, descending=True).values
    tree = tree_build(prompt[:, -1], marginals, torch.randint(5, 4096, (1, 7, 8)), 15)
    cache = TargetCache.empty(target, 1, length + tree.rows)
    at = torch.arange(length)[None]
    with torch.no_grad():
        target.extend(
            prompt[:, :-1], at, cache, at, torch.ones(1, length, length, dtype=torch.bool).tril()
        )
        mask = torch.cat(
            [torch.ones(1, tree.rows, length, dtype=torch.bool), ancestor_matrix(tree)], 2
        )
        slots = length + torch.arange(tree.rows)[None]
        logits, _ = target.extend(tree.tokens, length + tree.depths, cache, slots, mask)
    for row in range(tree.rows):
        path, node = [], row
        while node >= 0:
            path.append(int(tree.tokens[0, node]))
            node = int(tree.parents[0, node])
        alone = oracle.logits(prompt[0, :-1].tolist() + path[::-1])[-1]
        torch.testing.assert_close(logits[0, row], alone, atol=2e-4, rtol=1e-4)


def test_end_of_text_stops_and_counts_its_rounds() -> None:
    cut = cut_at_end([7, 8, EOS, 9, 10, 11], [2, 2, 1], ignore_eos=False)
    assert (cut.tokens, cut.gains) == ([7, 8, EOS], [2])
    assert cut_at_end([7, 8, EOS, 9], [3], ignore_eos=True).tokens == [7, 8, EOS, 9]
    assert cut_at_end([EOS, 8], [1], ignore_eos=False).rounds == 0


def test_bad_requests_are_refused(oracle: Oracle) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        oracle.greedy([], 4)
    with pytest.raises(ValueError, match="at least 1"):
        oracle.greedy([5], 0)
    with pytest.raises(ValueError, match="budget"):
        oracle.tree([5, 6], 4, 64)
