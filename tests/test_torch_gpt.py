"""A GPT in a file that knows PyTorch only, trained with its attention exchanged: the losses are those of PyTorch's attention."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch", reason="examples/torch_gpt.py needs PyTorch, which is not installed")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
example = importlib.import_module("torch_gpt")
pytestmark = pytest.mark.wide

MODEL = '''
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass
class GPTConfig:
    vocab_size: int
    block_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float


class GPT(nn.Module):
    """One layer of attention, whose weights are large enough to matter."""

    def __init__(self, config):
        super().__init__()
        self.heads = config.n_head
        self.tokens = nn.Embedding(config.vocab_size, config.n_embd)
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size)

    def forward(self, tokens, targets):
        x = self.tokens(tokens)
        b, n, d = x.shape
        q, k, v = (each.view(b, n, self.heads, -1).transpose(1, 2) for each in (2 * self.qkv(x)).split(d, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=True)
        scores = self.head(x + y.transpose(1, 2).contiguous().view(b, n, d))
        return scores, F.cross_entropy(scores.flatten(0, 1), targets.flatten())
'''


def test_the_losses_are_those_of_pytorch_s_attention(tmp_path: Path) -> None:
    """And are not those of an attention that sees every key, so that an attention that is not exchanged would show."""
    file = tmp_path / "model.py"
    file.write_text(MODEL)
    theirs = torch.nn.functional.scaled_dot_product_attention

    def unmasked(q: Any, k: Any, v: Any, **_: Any) -> Any:
        return theirs(q, k, v)

    calls = mock.Mock(wraps=example.scaled_dot_product_attention)
    with mock.patch.object(example, "SIZES", example.SIZES | {"block_size": 16, "n_layer": 1}):
        right, ours, other = (example.losses(file, 6, attention) for attention in (None, calls, unmasked))
    assert calls.call_count == 6 and right[-1] < right[0]
    differences = [[abs(one - two) for one, two in zip(right, losses, strict=True)] for losses in (ours, other)]
    assert max(differences[0]) < 1e-3 < max(differences[1])
