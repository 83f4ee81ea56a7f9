"""The example that trains: its loss falls, and its gradients are those of its loss."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cupy")
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def example() -> types.ModuleType:
    """examples/train_characters.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("train_characters", ROOT / "examples" / "train_characters.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.wide
def test_the_loss_falls_and_is_told(example: types.ModuleType) -> None:
    steps = 8
    told: list[str] = []
    _, losses = example.train(np, steps=steps, seed=1, tell=told.append)
    assert len(losses) == steps and losses[0] > 3.3 and losses[-1] < losses[0] - 0.5
    assert told == [f"step    0  loss {losses[0]:.3f}", f"step    {steps - 1}  loss {losses[-1]:.3f}"]
    assert losses[:2] == example.train(np, steps=2, seed=1, tell=told.append)[1]


@pytest.mark.wide
def test_gradients_are_the_loss_s_finite_differences(example: types.ModuleType) -> None:
    """Along the gradient of a parameter the loss rises by its square, by central differences in float32."""
    rng = np.random.default_rng(3)
    characters, batch, n = 11, 3, 20  # fewer positions than there are parameters for
    parameters = example.initial(np, characters, seed=2)
    tokens, targets = rng.integers(0, characters, (2, batch, n))
    _, gradients = example.loss_and_gradients(np, parameters, tokens, targets)
    assert {name: value.shape for name, value in gradients.items()} == {name: value.shape for name, value in parameters.items()}
    for name in ("qkv", "embedding", "position"):  # what attention stands between and the loss
        gradient = gradients[name].astype(np.float64)
        size = np.linalg.norm(gradient)
        noise = rng.standard_normal(gradient.shape)
        direction = gradient / size + noise / np.linalg.norm(noise)
        step = 0.02
        moved = [
            example.loss_and_gradients(
                np, parameters | {name: (parameters[name] + sign * step * direction).astype(np.float32)}, tokens, targets
            )[0]
            for sign in (1, -1)
        ]
        assert (moved[0] - moved[1]) / (2 * step) == pytest.approx(np.vdot(gradient, direction), rel=1e-2), name


@pytest.mark.wide
def test_the_curve_is_drawn(example: types.ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    example.plot([3.0, 2.5, 2.0], str(tmp_path / "loss.png"))
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
