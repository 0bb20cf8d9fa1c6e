"""The draft head: one decoder layer that guesses what the target will say next.

EAGLE's idea is that the target's last hidden state holds more than the token that was sampled from
it, and that the token holds what the hidden state can't know: which one was drawn. The head reads
both, and predicts the target's *next* hidden state. The target's own output head turns that into
the next token. Embedding and output head are the target's: the draft learns one layer and one
projection, 0.4 million parameters here.

The shift, exactly. Let ``h[p]`` be the target's normalized hidden state at position ``p``, from
which the token ``x[p + 1]`` was chosen. The draft's entry of position ``p`` reads

    ``input_ids = x[p + 1]``, ``hidden = h[p]``, ``positions = p``, ``slot_mapping = slot of p``

and returns a guess of ``h[p + 1]``; `DraftHead.logits` of that guess predicts ``x[p + 2]``. So where
the target ran over positions ``p .. q`` of a request, the draft's prefill takes the same positions,
slots and sequence lengths, and the target's hidden states as they are; only the tokens move one to
the left, with the newest token ``x[q + 1]`` at the end. Its last output predicts ``x[q + 2]``, the
first drafted token. To draft another, feed that token with the output itself, at position
``q + 1``; and so on. These later entries of the draft's cache were made from guesses: the next
prefill runs over the verified tokens and overwrites them, or moves on below them.

Rows of rejected tokens may stay in the prefill's batch: they come after the last verified row, which
is the one to draft from, so that it doesn't see them.

The draft's cache has one layer, and is addressed like the target's: one block table serves both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from . import weights
from .attention import Attention
from .model import Config, DecoderLayer, RMSNorm, TinyLM

DRAFT = Path(__file__).parent / "weights" / "draft.safetensors"
"""The trained draft head of the shipped target: 0.4 million parameters, 0.8 MB in fp16."""


def _layers_of(value: Any) -> tuple[int, ...]:
    return tuple(value)


@attrs.frozen
class DraftConfig:
    """The draft head's sizes, which are its target's.

    Attributes:
        target: the target's sizes.
        target_layers: empty for EAGLE: the draft reads the target's last hidden state. Otherwise
            EAGLE-3: it reads what these layers of the target leave in the residual stream.
    """

    target: Config = attrs.field(validator=attrs.validators.instance_of(Config))
    target_layers: tuple[int, ...] = attrs.field(default=(), converter=_layers_of)

    @target_layers.validator
    def _check_layers(self, attribute: Any, layers: tuple[int, ...]) -> None:
        # 1.0 and True are in a range too.
        if any(isinstance(layer, bool) or not isinstance(layer, int) for layer in layers):
            raise TypeError(f"target_layers={layers}: name layers of the target by their ints")
        allowed = range(self.target.layers)
        if any(layer not in allowed for layer in layers) or list(layers) != sorted(set(layers)):
            raise ValueError(
                f"target_layers={layers}: name layers of the target, 0 to {allowed[-1]}, "
                "each once, in rising order"
            )

    @property
    def cache_layers(self) -> int:
        """How many layers the draft's key-value cache has."""
        return 1

    @property
    def seen_width(self) -> int:
        """The width of what `DraftHead.fuse` takes."""
        return self.target.width * max(1, len(self.target_layers))


class DraftHead(nn.Module):
    """The draft head of one target.

    Its parameters are its own; the target's embedding, output head and rotary table are used where
    they are, and are neither stored nor moved with it.

    Args:
        config: its sizes.
        target: the model that it drafts for.
        dropout: share of the layer's output that training drops; inference drops nothing.
    """

    def __init__(self, config: DraftConfig, target: TinyLM, dropout: float = 0.0) -> None:
        super().__init__()
        if config.target != target.config:
            raise ValueError(
                f"a draft for {config.target} can't serve a target of {target.config}: "
                "build it from the target's own config"
            )
        width = config.target.width
        self.config = config
        # In a tuple, for a module kept as an attribute would be registered as a part of this one.
        self._target = (target,)
        if config.target_layers:
            self.fusion = nn.Linear(config.seen_width, width, bias=False)
        self.embedding_norm = RMSNorm(width)
        self.hidden_norm = RMSNorm(width)
        self.projection = nn.Linear(2 * width, width, bias=False)
        self.layer = DecoderLayer(config.target, 0, dropout)
        self.norm = RMSNorm(width)

    @property
    def target(self) -> TinyLM:
        """The model that it drafts for."""
        return self._target[0]

    def forward(
        self,
        input_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        attention: Attention,
    ) -> Tensor:
        """Guess the target's next hidden state; see the module for who is where.

        Args:
            input_ids: [tokens] int64, the token *after* each position.
            hidden: [tokens, width], the target's normalized hidden state *at* each position
                (through `fuse`), or, where the target hasn't been yet, what this method returned
                for the position before.
            positions: [tokens] int64, below ``max_length``.
            slot_mapping: [tokens] int64, where in the draft's cache each position lives.
            attention: who sees whom, over a cache of one layer.

        Returns:
            [tokens, width], normalized: what `logits` takes, and the ``hidden`` of the next position.
        """
        embedded = self.embedding_norm(self.target.embedding(input_ids))
        x = self.projection(torch.cat((embedded, self.hidden_norm(hidden)), dim=-1))
        # Autocast narrows what a projection returns; the residual stream keeps its width, as the
        # target's does.
        x = x.to(embedded.dtype)
        x = self.layer(x, self.target.rotary[positions], slot_mapping, attention)
        guess: Tensor = self.norm(x)
        return guess

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the token two after each position: [tokens, width] to [tokens, vocab] fp32."""
        return self.target.logits(hidden)

    def fuse(self, seen: Tensor) -> Tensor:
        """What `run_target` saw, as the ``hidden`` that `forward` takes.

        Args:
            seen: [tokens, config.seen_width].

        Returns:
            [tokens, width]: ``seen`` itself where the draft reads the last hidden state.
        """
        if not self.config.target_layers:
            return seen
        fused: Tensor = self.fusion(seen)
        return fused.to(seen.dtype)  # for autocast, as in `forward`

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        """Draw fresh weights; the last norm starts as the target's, whose output it imitates."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            scale = 0.02 if name.startswith("layer.") else parameter.shape[1] ** -0.5
            parameter.normal_(0.0, scale, generator=generator)
        self.norm.gain.copy_(self.target.norm.gain)


def run_target(
    target: TinyLM,
    layers: tuple[int, ...],
    input_ids: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    attention: Attention,
) -> tuple[Tensor, Tensor]:
    """The target's forward, with what a draft head reads of it.

    Args:
        target: the target.
        layers: the draft's ``config.target_layers``.
        input_ids: like the other arguments, what the target takes.
        positions: see ``input_ids``.
        slot_mapping: see ``input_ids``.
        attention: see ``input_ids``.

    Returns:
        The hidden state, [tokens, width], as the target itself returns it; and what
        `DraftHead.fuse` takes, [tokens, config.seen_width].
    """
    if not layers:
        hidden = target(input_ids, positions, slot_mapping, attention)
        return hidden, hidden
    x = target.embedding(input_ids)
    cos_sin = target.rotary[positions]
    seen = []
    for index, layer in enumerate(target.layers):
        x = layer(x, cos_sin, slot_mapping, attention)
        if index in layers:
            seen.append(x)
    return target.norm(x), torch.cat(seen, dim=-1)


def load_draft(
    target: TinyLM,
    path: Path = DRAFT,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> DraftHead:
    """The trained draft head, ready to serve: no gradients, evaluation mode.

    Args:
        target: the model that it drafts for.
        path: the weights file.
        dtype: by default the target's; another doesn't work with the target's output head.
        device: by default the target's.

    Raises:
        weights.WeightsError: the file is missing, damaged, or made for a target of other sizes.
    """
    if not path.exists():
        raise weights.WeightsError(
            f"no draft weights at {path}: train them, see examples/eagle/train_draft.py"
        )
    stored = weights.read_metadata(path)
    try:
        fields = stored["draft_config"]
        config = DraftConfig(Config(**fields["target"]), fields["target_layers"])
    except (KeyError, TypeError, ValueError):
        raise weights.WeightsError(
            f"{path} doesn't say what sizes its draft head has: restore it"
        ) from None
    if config.target != target.config:
        raise weights.WeightsError(
            f"{path} drafts for a target of {config.target}, and this one has {target.config}: "
            "train a draft head for it, see examples/eagle/train_draft.py"
        )
    with torch.device("cpu"):
        draft = DraftHead(config, target)
    shared = target.embedding.weight
    weights.load_into(path, draft, dtype or shared.dtype, device or shared.device)
    return draft.eval().requires_grad_(False)
