"""Training the drafter on a GPU, for a fixed time: first rollouts, then block prediction.

    python -m overstory.workers.tiny.train_drafter --data FOLDER --target FOLDER --out FOLDER

Three kinds of steps alternate: greedy rollouts with the tokens as labels, sampled rollouts with
the target's distribution as labels, and source text (long contexts) with the same. The learning
rate follows the clock, rollouts and compilation excluded.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .checkpoint import load_drafter, load_target, save_drafter
from .config import DrafterConfig
from .drafter import Attend, DrafterModel, masked_attention
from .rollouts import Rollouts, collect, continue_texts, draw_prompts, states
from .streams import read_streams
from .target import TargetModel
from .train_target import cosine, crops, make_optimizer


@dataclass(frozen=True)
class Settings:
    """Everything that shapes the run."""

    learning_rate: float = 2e-3
    final_learning_rate: float = 0.02
    warmup_steps: int = 150
    weight_decay: float = 0.05
    depth_decay: float = 4.0
    """Depth k of a block weighs exp(-(k - 1) / depth_decay)."""
    rollout_batches: int = 4
    """Batches of rollouts per temperature."""
    rollout_texts: int = 2048
    """Texts per batch of rollouts."""
    rollout_length: int = 640
    prompt_lengths: tuple[int, ...] = (64, 128, 160, 256)
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.7, 1.0)
    """Of the rollouts; one set of rollouts each."""
    greedy_share: float = 0.5
    text_share: float = 0.2
    """Shares of steps; the rest goes to sampled rollouts."""
    held_out_texts: int = 256
    rollout_rows: int = 128
    rollout_anchors: int = 64
    text_rows: int = 24
    text_length: int = 2048
    text_anchors: int = 128
    seed: int = 2


SMALL = Settings(
    rollout_batches=1,
    rollout_texts=20,
    rollout_length=128,
    prompt_lengths=(32,),
    held_out_texts=4,
    rollout_rows=4,
    rollout_anchors=8,
    text_rows=10,
    text_length=256,
    text_anchors=8,
)
"""For trying the code; bfloat16 makes it take minutes on a CPU all the same."""


class Blocks(NamedTuple):
    """A batch of texts with the places where blocks start."""

    ids: Tensor
    """Text [rows, length], int64."""
    features: Tensor
    """Target features [rows, length, layers * hidden]."""
    hidden: Tensor
    """Final target states [rows, length, hidden]."""
    anchors: Tensor
    """Positions of the first tokens of blocks [rows, blocks], int64, ascending."""
    temperature: Tensor
    """Of the labels, per text [rows]; unused for hard labels."""


def block_mask(anchors: Tensor, length: int, block: int) -> Tensor:
    """What block rows see: [rows, 1, blocks * block, length + blocks * block], additive bfloat16.

    A block sees the context before its anchor and itself.
    """
    queries = anchors.shape[1] * block
    before = (
        torch.arange(length, device=anchors.device) < anchors.repeat_interleave(block, 1)[..., None]
    )
    owner = torch.arange(queries, device=anchors.device) // block
    own = (owner[:, None] == owner).expand(len(anchors), -1, -1)
    seen = torch.cat([before, own], -1)[:, None]
    mask = torch.zeros(seen.shape, dtype=torch.bfloat16, device=anchors.device)
    return mask.masked_fill(~seen, -torch.inf)


class BlockLoss:
    """Cross entropy of drafted blocks, by hard or soft labels."""

    def __init__(self, target: TargetModel, drafter: DrafterModel, settings: Settings) -> None:
        self.target, self.drafter = target, drafter
        self.block = drafter.config.block_size
        depths = torch.arange(self.block - 1, device=target.embed_tokens.weight.device)
        weights = torch.exp(-depths / settings.depth_decay)
        self.weights = weights / weights.sum()

    def draft(self, b: Blocks, attend: Attend) -> Tensor:
        """Drafted logits [rows, blocks, block - 1, vocab]."""
        rows, blocks = b.anchors.shape
        offsets = torch.arange(self.block, device=b.ids.device)
        at = (b.anchors[..., None] + offsets).flatten(1)
        tokens = torch.full(
            (rows, blocks, self.block), self.drafter.config.mask_token_id, device=b.ids.device
        )
        tokens[..., 0] = b.ids.gather(1, b.anchors)
        before = torch.arange(b.ids.shape[1], device=b.ids.device)[None]
        with torch.autocast(b.ids.device.type, torch.bfloat16):
            embeddings = self.target.embed_tokens(tokens.flatten(1)).bfloat16()
            context = self.drafter.context(b.features, before)
            out = self.drafter(embeddings, at, context, attend)
            return self.target.lm_head(out.unflatten(1, (blocks, self.block))[:, :, 1:])

    def _labels_at(self, b: Blocks, ahead: int) -> tuple[Tensor, Tensor]:
        rows = torch.arange(len(b.ids), device=b.ids.device)[:, None, None]
        return rows, b.anchors[..., None] + torch.arange(self.block - 1, device=rows.device) + ahead

    def hard(self, b: Blocks, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Loss against the text's own tokens; and how often each depth is reached and right."""
        logits = self.draft(b, masked_attention(mask))
        labels = b.ids[self._labels_at(b, 1)]
        loss = F.cross_entropy(logits.float().flatten(0, 2), labels.flatten(), reduction="none")
        return self._reduce(loss.view(labels.shape), logits.argmax(-1) == labels)

    def soft(self, b: Blocks, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Loss against the target's distribution after each true prefix."""
        logits = self.draft(b, masked_attention(mask))
        with torch.no_grad(), torch.autocast(b.ids.device.type, torch.bfloat16):
            wanted = self.target.lm_head(b.hidden[self._labels_at(b, 0)]).float()
        probabilities = (wanted / b.temperature[:, None, None, None]).softmax(-1)
        loss = -(probabilities * logits.float().log_softmax(-1)).sum(-1)
        return self._reduce(loss, logits.argmax(-1) == wanted.argmax(-1))

    def _reduce(self, loss: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        return (loss * self.weights).sum(-1).mean(), right.float().cumprod(-1).mean((0, 1))


class Batches:
    """Draws training batches from rollouts and from source text."""

    def __init__(
        self,
        target: TargetModel,
        layers: tuple[int, ...],
        rollouts: list[Rollouts],
        text: list[tuple[Tensor, float]],
        settings: Settings,
    ) -> None:
        self.target, self.layers, self.text, self.settings = target, layers, text, settings
        self.greedy = [r for r in rollouts if not r.temperature[0]]
        self.sampled = [r for r in rollouts if r.temperature[0]]
        self.states = lambda ids: states(target, ids, layers)
        if target.embed_tokens.weight.is_cuda:
            self.states = torch.compile(self.states, dynamic=False)

    def rollout(self, sets: list[Rollouts]) -> Blocks:
        """Blocks in the written part of random rollouts of one set."""
        s = self.settings
        rollouts = random.choice(sets)
        which = torch.randint(0, len(rollouts), (s.rollout_rows,), device=rollouts.ids.device)
        anchors = torch.multinomial(rollouts.weights[which], s.rollout_anchors)
        return Blocks(
            rollouts.ids[which].long(),
            rollouts.features[which],
            rollouts.hidden[which],
            anchors.sort(1).values,
            rollouts.temperature[which],
        )

    def source_text(self) -> Blocks:
        """Blocks in random crops of source text."""
        s = self.settings
        ids = draw_prompts(self.text, s.text_rows, s.text_length)
        features, hidden = self.states(ids)
        shape = (len(ids), s.text_anchors)
        anchors = torch.randint(1, s.text_length - 8, shape, device=ids.device)
        heat = torch.ones(len(ids), device=ids.device)
        return Blocks(ids.long(), features, hidden, anchors.sort(1).values, heat)


def make_rollouts(
    target: TargetModel, streams: dict[str, Tensor], config: DrafterConfig, s: Settings
) -> list[Rollouts]:
    """Rollouts per temperature, mostly from prompts that the target was not trained on."""
    sources = [
        (streams["reserved_standard"], 0.3),
        (streams["reserved_other"], 0.3),
        (streams["standard"], 0.2),
        (streams["other"], 0.2),
    ]
    out = []
    for temperature in s.temperatures:
        prompts = [
            draw_prompts(sources, s.rollout_texts, s.prompt_lengths[i % len(s.prompt_lengths)])
            for i in range(s.rollout_batches)
        ]
        layers, block = config.target_layer_ids, config.block_size
        out.append(collect(target, prompts, s.rollout_length, temperature, layers, block))
    return out


class Trainer:
    """One training run of the drafter."""

    def __init__(self, target: TargetModel, streams: dict[str, Tensor], settings: Settings) -> None:
        torch.manual_seed(settings.seed)
        random.seed(settings.seed)
        self.settings, self.target, self.streams = settings, target, streams
        device = target.embed_tokens.weight.device
        self.drafter = DrafterModel(DrafterConfig()).to(device)
        self.optimizer = make_optimizer(
            self.drafter, settings.learning_rate, settings.weight_decay, device.type == "cuda"
        )
        start = time.monotonic()
        config = self.drafter.config
        rollouts = make_rollouts(target, streams, config, settings)
        self.rollout_tokens = sum(int((r.ids.shape[1] - r.prompt).sum()) for r in rollouts)
        self.rollout_seconds = time.monotonic() - start
        print(f"rollouts: {self.rollout_tokens} tokens, {self.rollout_seconds:.0f} s", flush=True)
        text = [
            (streams["standard"], 0.3),
            (streams["other"], 0.4),
            (streams["reserved_standard"], 0.15),
            (streams["reserved_other"], 0.15),
        ]
        self.batches = Batches(target, config.target_layer_ids, rollouts, text, settings)
        self.losses = BlockLoss(target, self.drafter, settings)
        hard, soft = self.losses.hard, self.losses.soft
        if device.type == "cuda":
            hard = torch.compile(hard, dynamic=False)
            soft = torch.compile(soft, dynamic=False)
        draw = self.batches
        self.kinds: dict[str, tuple[Callable[[], Blocks], Callable[..., tuple[Tensor, Tensor]]]] = {
            "greedy": (lambda: draw.rollout(draw.greedy), hard),
            "sampled": (lambda: draw.rollout(draw.sampled), soft),
            "text": (draw.source_text, soft),
        }
        self._held_out: Tensor | None = None
        self.steps = self.blocks = 0
        self.log: list[dict[str, object]] = []

    def loss(self, kind: str) -> tuple[Tensor, Tensor]:
        """Loss of a fresh batch of one kind, and the shares of blocks right up to each depth."""
        draw, compute = self.kinds[kind]
        blocks = draw()
        self.blocks += blocks.anchors.numel()
        mask = block_mask(blocks.anchors, blocks.ids.shape[1], self.losses.block)
        return compute(blocks, mask)

    def warm_up(self) -> None:
        """Compile for every kind of batch, off the clock."""
        for kind in self.kinds:
            self.loss(kind)[0].backward()
        self.optimizer.zero_grad(set_to_none=True)
        self.blocks = 0

    def run(self, seconds: float) -> None:
        """Train for `seconds`, and for two steps at least."""
        s, start = self.settings, time.monotonic()
        shares = (s.greedy_share, 1 - s.greedy_share - s.text_share, s.text_share)
        while True:
            elapsed = time.monotonic() - start
            if elapsed >= seconds and self.steps >= 2:
                break
            fraction = elapsed / max(seconds, 1e-9)
            factor = cosine(fraction, self.steps, s.warmup_steps, s.final_learning_rate)
            for group in self.optimizer.param_groups:
                group["lr"] = s.learning_rate * factor
            kind = random.choices(list(self.kinds), shares)[0]
            loss, right = self.loss(kind)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.steps += 1
            if self.steps % 500 == 0 or self.steps == 1:
                row: dict[str, object] = {
                    "step": self.steps,
                    "seconds": round(elapsed, 1),
                    "kind": kind,
                    "loss": round(loss.item(), 4),
                    "chain": round(1 + right.sum().item(), 3),
                }
                self.log.append(row)
                print(row, flush=True)
            if self.steps % 3000 == 0:
                self.log.append({"step": self.steps, "held_out_chain": self.held_out_chain()})
                print(self.log[-1], flush=True)

    @torch.no_grad()
    def held_out_chain(self, length: int = 384) -> float:
        """Mean tokens per chain over all positions of greedy texts from held-out prompts."""
        texts = self.settings.held_out_texts
        if self._held_out is None:
            prompts = crops(self.streams["held_out"], texts, 160)
            zero = torch.zeros(texts, device=prompts.device)
            self._held_out = continue_texts(self.target, prompts, length, zero)
        total = 0.0
        for ids in self._held_out.split(64):
            anchors = torch.arange(160, length - 8, 4, device=ids.device).expand(len(ids), -1)
            features, hidden = states(self.target, ids, self.drafter.config.target_layer_ids)
            heat = torch.ones(len(ids), device=ids.device)
            blocks = Blocks(ids.long(), features, hidden, anchors, heat)
            mask = block_mask(anchors, length, self.losses.block)
            right = self.losses.hard(blocks, mask)[1]
            total += (1 + right.sum().item()) * len(ids)
        return round(total / texts, 3)


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="train the built-in drafter")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=270.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny batches, to try the code")
    arguments = parser.parse_args()

    torch.set_float32_matmul_precision("high")
    settings = SMALL if arguments.small else Settings()
    device = arguments.device
    streams = {
        name: torch.from_numpy(stream.astype("int32")).to(device)
        for name, stream in read_streams(arguments.data / "streams.bin").items()
    }
    torch.manual_seed(settings.seed)
    target = load_target(arguments.target, device)
    trainer = Trainer(target, streams, settings)
    started = time.monotonic()
    trainer.warm_up()
    compiled = time.monotonic()
    trainer.run(arguments.seconds)
    trained = time.monotonic()
    save_drafter(trainer.drafter, arguments.out)
    trainer.drafter.load_state_dict(load_drafter(arguments.out, device).state_dict())
    report = {
        "held_out_chain_all_positions": trainer.held_out_chain(),
        "steps": trainer.steps,
        "blocks": trainer.blocks,
        "rollout_tokens": trainer.rollout_tokens,
        "rollout_seconds": round(trainer.rollout_seconds, 1),
        "compile_seconds": round(compiled - started, 1),
        "train_seconds": round(trained - compiled, 1),
        "peak_gigabytes": torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else None,
        "torch": torch.__version__,
    }
    print(json.dumps(report), flush=True)
    report["log"] = trainer.log
    (arguments.out / "training.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
