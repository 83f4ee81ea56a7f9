"""Trains somebody else's GPT with cupyflash's attention:  python examples/torch_gpt.py model.py [--steps 20] [--on_gpu]

model.py is nanoGPT's, or another file with its `GPT` and `GPTConfig`, which calls
`torch.nn.functional.scaled_dot_product_attention`. The file stays as it is: that function is exchanged. The model learns the text
of its own source, letter by letter, once with each attention from the same weights and batches; what is printed is both losses.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from cupyflash.torch import scaled_dot_product_attention

SIZES = {"block_size": 32, "n_layer": 2, "n_head": 2, "n_embd": 32, "dropout": 0.0}
BATCH = 4


def losses(file: Path, steps: int, attention: Callable[..., Any] | None = None, device: str = "cpu") -> list[float]:
    """The loss of each of `steps` steps of AdamW; `attention` in place of PyTorch's, if given."""
    source = importlib.util.spec_from_file_location("model", file)
    assert source is not None and source.loader is not None
    module = importlib.util.module_from_spec(source)
    source.loader.exec_module(module)
    text = torch.tensor(list(file.read_bytes()))
    torch.manual_seed(0)
    model = module.GPT(module.GPTConfig(vocab_size=256, **SIZES)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found = []
    functional = torch.nn.functional
    with mock.patch.object(functional, "scaled_dot_product_attention", attention or functional.scaled_dot_product_attention):
        for _ in range(steps):
            starts = torch.randint(len(text) - SIZES["block_size"] - 1, (BATCH, 1))
            places = starts + torch.arange(SIZES["block_size"])
            _, loss = model(text[places].to(device), text[places + 1].to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0] if __doc__ else None)
    parser.add_argument("model", type=Path, help="the file with GPT and GPTConfig")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--on_gpu", action="store_true", help="CUDA tensors in place of CPU tensors")
    asked = parser.parse_args()
    device = "cuda" if asked.on_gpu else "cpu"
    both = [losses(asked.model, asked.steps, attention, device) for attention in (None, scaled_dot_product_attention)]
    for step, (theirs, ours) in enumerate(zip(*both, strict=True)):
        print(f"step {step:3}: PyTorch {theirs:.6f}, cupyflash {ours:.6f}, difference {abs(theirs - ours):.1e}")
