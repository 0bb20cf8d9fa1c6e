"""A Hugging Face Llama, split without edits: attention runs as a break."""

from __future__ import annotations

import warnings

import pytest
import torch

import graphkit as gk
from graphkit import fx

transformers = pytest.importorskip("transformers")

TOKENS = gk.Dim("tokens", 64)


class Logits(torch.nn.Module):
    """One sequence in, logits out: what a runner calls; the model itself is untouched."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        made = self.model(input_ids=input_ids[None], position_ids=positions[None], use_cache=False)
        return made.logits[0]


def tiny_llama(device: str) -> Logits:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        attn_implementation="sdpa",
    )
    return Logits(transformers.LlamaForCausalLM(config).to(device).eval())


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:transformers"
)
@pytest.mark.parametrize("through", ["export", "compile"])
def test_it_equals_eager_at_every_bucket(device, through):
    model = tiny_llama(device)
    group = gk.GraphGroup(device)
    inputs = vars(
        group.buffers.declare(
            input_ids=gk.BufferSpec((TOKENS,), torch.int64, pad=0),
            positions=gk.BufferSpec((TOKENS,), torch.int64, pad=0),
        )
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracer's, of the library's code
        split = fx.split(
            model, at=[torch.ops.aten.scaled_dot_product_attention], inputs=inputs, through=through
        )
    assert split.num_breaks == 2
    runner = group.runner(
        "llama",
        split,
        policy=gk.Policy.piecewise(gk.Buckets.of(TOKENS, 1, 2, 8, 32)),
        reads=[model],
    )
    group.capture()
    assert {len(entry._graphs[-1].segments) for entry in runner.entries} == {3}
    for count in (1, 2, 3, 7, 8, 20, 32, 40):
        ids = torch.randint(0, 96, (count,), device=device)
        positions = torch.arange(count, device=device)
        made = runner.run(runner.dispatch(tokens=count), input_ids=ids, positions=positions)
        with torch.no_grad():
            expected = model(ids, positions)
        torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)
