"""Training the target on a GPU, for a fixed time.

    python -m overstory.workers.tiny.train_target --data FOLDER --out FOLDER --seconds 270

`--data` is what `prepare` wrote. The learning rate follows the clock (compilation excluded), so the
run ends in time on any machine; with `--seconds 0` it only compiles and takes two steps.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from .checkpoint import load_target, save_target
from .config import TargetConfig
from .streams import read_streams
from .target import TargetModel


@dataclass(frozen=True)
class Settings:
    """Everything that shapes the run."""

    learning_rate: float = 2.5e-3
    final_learning_rate: float = 0.02
    """Share of the learning rate that is left at the end."""
    warmup_steps: int = 150
    weight_decay: float = 0.1
    standard_share: float = 0.35
    """Share of each batch that comes from the standard library."""
    tokens_per_batch: int = 131_072
    short: int = 1024
    long: int = 4096
    long_from: float = 0.85
    """Fraction of the time after which sequences are long."""
    balance_rate: float = 1e-3
    """Step of the routing correction, at the start; falls to zero with time."""
    seed: int = 1


@dataclass
class Corpus:
    """Token streams on the device, int32 [tokens]."""

    standard: Tensor
    other: Tensor
    held_out: Tensor

    @classmethod
    def load(cls, folder: Path, device: str) -> Corpus:
        """Read `streams.bin` of `folder`."""
        streams = read_streams(folder / "streams.bin")
        names = ("standard", "other", "held_out")
        return cls(*(torch.from_numpy(streams[n].astype("int32")).to(device) for n in names))

    def batch(self, rows: int, length: int, standard_share: float) -> Tensor:
        """Random crops [rows, length + 1]."""
        standard = round(rows * standard_share)
        return torch.cat(
            [
                crops(self.standard, standard, length + 1),
                crops(self.other, rows - standard, length + 1),
            ]
        )


def crops(stream: Tensor, rows: int, length: int) -> Tensor:
    """Random crops [rows, length] of a stream [tokens]."""
    starts = torch.randint(0, len(stream) - length, (rows,), device=stream.device)
    return stream[starts[:, None] + torch.arange(length, device=stream.device)]


def next_token_loss(model: TargetModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross entropy in nats over `ids` [rows, length + 1], and the expert loads."""
    with torch.autocast(ids.device.type, torch.bfloat16):
        out = model(ids[:, :-1])
        logits = model.lm_head(out.hidden)
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten().long()), out.loads


@torch.no_grad()
def held_out_loss(model: TargetModel, stream: Tensor, window: int, rows: int = 16) -> float:
    """Mean loss in nats per token over consecutive windows of `stream`, in the model's dtype."""
    count = (len(stream) - 1) // window
    windows = torch.stack([stream[i * window : (i + 1) * window + 1] for i in range(count)])
    total = 0.0
    for ids in windows.split(max(1, rows * 1024 // window)):
        logits = model.lm_head(model(ids[:, :-1]).hidden)
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten().long())
        total += loss.item() * len(ids)
    return total / count


@torch.no_grad()
def balance(model: TargetModel, loads: Tensor, rate: float) -> None:
    """Nudge the routing corrections against the loads [sparse layers, experts]."""
    for layer, load in zip(model.sparse_layers, loads, strict=True):
        layer.correction += rate * torch.sign(load.mean() - load)
        layer.correction -= layer.correction.mean()


def make_optimizer(
    model: torch.nn.Module, learning_rate: float, weight_decay: float, fused: bool
) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only, embeddings excepted."""
    decayed: list[torch.nn.Parameter] = []
    plain: list[torch.nn.Parameter] = []
    for name, weight in model.named_parameters():
        (decayed if weight.dim() > 1 and "embed" not in name else plain).append(weight)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=fused)


def cosine(fraction: float, step: int, warmup: int, final: float) -> float:
    """Learning rate factor at a fraction of the time: linear warm-up, then cosine to `final`."""
    warm = min(1.0, (step + 1) / warmup)
    return warm * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(1.0, fraction))))


LossAndLoads = Callable[[Tensor], tuple[Tensor, Tensor]]


class Trainer:
    """One training run: the model, its optimiser and its log."""

    def __init__(self, corpus: Corpus, settings: Settings, device: str) -> None:
        self.corpus, self.settings = corpus, settings
        torch.manual_seed(settings.seed)
        self.model = TargetModel(TargetConfig()).to(device)
        self.optimizer = make_optimizer(
            self.model, settings.learning_rate, settings.weight_decay, device == "cuda"
        )
        self.loss: LossAndLoads = lambda ids: next_token_loss(self.model, ids)
        if device == "cuda":
            self.loss = torch.compile(self.loss, dynamic=False)
        self.log: list[dict[str, float]] = []
        self.steps = self.tokens = 0

    def batch(self, length: int) -> Tensor:
        """A batch of the fixed number of tokens in sequences of `length`."""
        rows = self.settings.tokens_per_batch // length
        return self.corpus.batch(rows, length, self.settings.standard_share)

    def warm_up(self) -> None:
        """Compile for both lengths, off the clock."""
        for length in (self.settings.short, self.settings.long):
            self.loss(self.batch(length))[0].backward()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, fraction: float) -> tuple[Tensor, Tensor]:
        """One optimiser step at a fraction of the time; returns loss and expert loads."""
        s = self.settings
        factor = cosine(fraction, self.steps, s.warmup_steps, s.final_learning_rate)
        for group in self.optimizer.param_groups:
            group["lr"] = s.learning_rate * factor
        length = s.long if fraction > s.long_from else s.short
        loss, loads = self.loss(self.batch(length))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if fraction < 0.95:
            balance(self.model, loads, s.balance_rate * (1 - fraction))
        self.steps += 1
        self.tokens += s.tokens_per_batch
        return loss, loads

    def run(self, seconds: float) -> None:
        """Train for `seconds`, and for two steps at least."""
        start = time.monotonic()
        while True:
            elapsed = time.monotonic() - start
            if elapsed >= seconds and self.steps >= 2:
                break
            loss, loads = self.step(elapsed / max(seconds, 1e-9))
            if self.steps % 250 == 0 or self.steps == 1:
                self._note(elapsed, loss, loads)
            if self.steps % 2000 == 0:
                held = held_out_loss(self.model, self.corpus.held_out, 1024)
                self.log[-1]["held_out"] = held
                print(f"  held-out loss {held:.3f}", flush=True)

    def _note(self, elapsed: float, loss: Tensor, loads: Tensor) -> None:
        row = {
            "step": self.steps,
            "seconds": round(elapsed, 1),
            "loss": round(loss.item(), 4),
            "tokens": self.tokens,
            "least_load": round(loads.min().item(), 3),
            "most_load": round(loads.max().item(), 3),
        }
        self.log.append(row)
        print(row, flush=True)


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="train the built-in target")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=270.0)
    parser.add_argument("--tokens-per-batch", type=int, default=Settings.tokens_per_batch)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()

    torch.set_float32_matmul_precision("high")
    corpus = Corpus.load(arguments.data, arguments.device)
    settings = Settings(tokens_per_batch=arguments.tokens_per_batch)
    trainer = Trainer(corpus, settings, arguments.device)
    started = time.monotonic()
    trainer.warm_up()
    compiled = time.monotonic()
    trainer.run(arguments.seconds)
    trained = time.monotonic()
    save_target(trainer.model, arguments.out)

    stored = load_target(arguments.out, arguments.device)
    windows = (256, 1024, 4096) if arguments.seconds else (256,)
    report = {
        "held_out_loss": {w: held_out_loss(stored, corpus.held_out, w) for w in windows},
        "train_loss_standard_1024": held_out_loss(stored, corpus.standard[: 1 << 18], 1024)
        if arguments.seconds
        else None,
        "steps": trainer.steps,
        "tokens": trainer.tokens,
        "compile_seconds": round(compiled - started, 1),
        "train_seconds": round(trained - compiled, 1),
        "peak_gigabytes": torch.cuda.max_memory_allocated() / 1e9
        if arguments.device == "cuda"
        else None,
        "torch": torch.__version__,
    }
    print(json.dumps(report), flush=True)
    report["log"] = trainer.log
    (arguments.out / "training.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
