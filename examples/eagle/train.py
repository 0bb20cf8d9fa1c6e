"""Train the target model: ``python -m examples.eagle.train``.

About 15 minutes on one CPU core. Everything random comes from one seed, so that two runs on one
machine write the same file; another CPU rounds differently and ends near it. The shipped weights
are those of the defaults below, trained on CPython 3.11.7's text.
"""

from __future__ import annotations

import argparse
import math
import platform
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from . import corpus, weights
from .attention import DenseAttention
from .model import Config, TinyLM

SEED = 20_26
STEPS = 2_400
TOKENS_PER_STEP = 4_096
PEAK_LEARNING_RATE = 3e-3
WARMUP_STEPS = 100
# The text is small. Without these the loss on it is soon far below the held-out loss: by 0.4 bits
# per byte after eight passes.
WEIGHT_DECAY = 0.3
DROPOUT = 0.2

# Short sequences first: most of what a byte can be predicted from is near, and they cost less. The
# longest ones come last, so that all positions up to the model's maximum are learned.
LENGTHS = ((0.4, 128), (0.8, 256), (1.0, 512))


def next_byte_loss(model: TinyLM, text: Tensor) -> Tensor:
    """Mean cross entropy, in nats, of every next byte.

    Args:
        model: the model.
        text: [batch, length + 1] int64, bytes.
    """
    batch, length = text.shape[0], text.shape[1] - 1
    positions = torch.arange(length, dtype=torch.int64, device=text.device).repeat(batch)
    inputs, targets = text[:, :-1].flatten(), text[:, 1:].flatten()
    # A dense batch has no cache, so its slots are never read.
    hidden = model(inputs, positions, positions, DenseAttention(batch))
    return F.cross_entropy(model.logits(hidden), targets)


@torch.no_grad()
def bits_per_byte(model: TinyLM, text: bytes, length: int = 256) -> float:
    """Bits that the model needs for a byte of ``text``, read in pieces of ``length`` bytes.

    The first byte of a piece is given, and what doesn't fill the last piece is left out. The model
    should be in evaluation mode.
    """
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int64)
    pieces = data[: len(data) // length * length].view(-1, length)
    losses = [next_byte_loss(model, chunk).item() * len(chunk) for chunk in torch.split(pieces, 16)]
    return sum(losses) / len(pieces) / math.log(2)


def length_at(progress: float) -> int:
    """The sequence length at a share of the training."""
    return next(length for until, length in LENGTHS if progress < until)


def learning_rate_at(step: int, steps: int) -> float:
    """Linear warm-up, then half a cosine down to a hundredth of the peak."""
    if step < WARMUP_STEPS:
        return PEAK_LEARNING_RATE * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return PEAK_LEARNING_RATE * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def optimizer_for(model: TinyLM) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves gains alone."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    gains = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": gains, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95))


def train(path: Path, steps: int = STEPS, save_every: int = 400) -> TinyLM:
    """Train from scratch and write the weights to ``path``, now and then and at the end."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)  # dropout draws from the default generator
        return _train(path, steps, save_every)


def _train(path: Path, steps: int, save_every: int) -> TinyLM:
    generator = torch.Generator().manual_seed(SEED)
    model = TinyLM(Config(), DROPOUT)
    model.initialize(generator)
    optimizer = optimizer_for(model)
    data = torch.frombuffer(bytearray(corpus.train_text()), dtype=torch.uint8).to(torch.int64)
    recent, began = 0.0, time.monotonic()
    for step in range(steps):
        length = length_at(step / steps)
        batch = TOKENS_PER_STEP // length
        starts = torch.randint(len(data) - length, (batch, 1), generator=generator)
        text = data[starts + torch.arange(length + 1)]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, steps)
        with torch.autocast("cpu", torch.bfloat16):
            loss = next_byte_loss(model, text)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        recent += (loss.item() - recent) * (1.0 if step == 0 else 0.02)
        done = step + 1
        if done % save_every == 0 or done == steps:
            heldout = bits_per_byte(model.eval(), corpus.heldout_text(), length)
            model.train()
            training = {
                "steps": done,
                "seed": SEED,
                "train_bits_per_byte": round(recent / math.log(2), 4),
                "heldout_bits_per_byte": round(heldout, 4),
                "text": f"pydoc_data.topics of CPython {platform.python_version()}",
            }
            weights.save(
                path, model, {"config": weights.describe(model.config), "training": training}
            )
        if done % 100 == 0 or done == steps:
            minutes = (time.monotonic() - began) / 60
            shown = f", held out {heldout:.3f}" if done % save_every == 0 or done == steps else ""
            print(
                f"step {done}/{steps}: {recent / math.log(2):.3f} bits per byte{shown}, "
                f"{minutes:.1f} min",
                flush=True,
            )
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=weights.TARGET, help="where the weights go")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps")
    arguments = parser.parse_args()
    train(arguments.out, arguments.steps)


if __name__ == "__main__":
    main()
