"""Trains a one-layer character model with cupyflash's gradients:  python examples/train_characters.py [--plot loss.png]

One attention block of two heads, causal, and an MLP, with residuals and a normalisation before each; the loss is the
cross-entropy of the next character; the optimiser is Adam. Everything but attention is plain array code, and
`attention_vjp` is attention with its gradients: on a GPU all of it runs on CuPy arrays, without one on NumPy arrays, where
the same kernels run on the simulated device (about a minute).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import cupyflash

# William Shakespeare, Sonnet 18 (1609).
TEXT = """\
Shall I compare thee to a summer's day?
Thou art more lovely and more temperate:
Rough winds do shake the darling buds of May,
And summer's lease hath all too short a date:
Sometime too hot the eye of heaven shines,
And often is his gold complexion dimm'd;
And every fair from fair sometime declines,
By chance, or nature's changing course, untrimm'd;
But thy eternal summer shall not fade,
Nor lose possession of that fair thou ow'st;
Nor shall Death brag thou wander'st in his shade,
When in eternal lines to time thou grow'st:
So long as men can breathe or eyes can see,
So long lives this, and this gives life to thee.
"""
ALPHABET = sorted(set(TEXT))
HEADS, HEAD_DIM, LENGTH, BATCH = 2, 16, 32, 8
WIDTH, HIDDEN = HEADS * HEAD_DIM, 4 * HEADS * HEAD_DIM

Parameters = dict[str, Any]
# O of Q, K and V, (b, h, n, d) each, and its pullback
Attention = Callable[[Any, Any, Any], tuple[Any, Any]]


def initial(xp: Any, characters: int, seed: int, length: int = LENGTH) -> Parameters:
    """Random float32 parameters of a model for texts of up to `length`, each scaled by the width that feeds it."""
    rng = np.random.default_rng(seed)

    def normal(rows: int, cols: int, scale: float) -> Any:
        return xp.asarray((rng.standard_normal((rows, cols)) * scale).astype(np.float32))

    return {
        "embedding": normal(characters, WIDTH, 0.5),
        "position": normal(length, WIDTH, 0.5),
        "qkv": normal(WIDTH, 3 * WIDTH, WIDTH**-0.5),
        "project": normal(WIDTH, WIDTH, WIDTH**-0.5),
        "widen": normal(WIDTH, HIDDEN, WIDTH**-0.5),
        "narrow": normal(HIDDEN, WIDTH, HIDDEN**-0.5),
        "logits": normal(WIDTH, characters, WIDTH**-0.5),
    }


def normalise(xp: Any, x: Any) -> tuple[Any, Callable[[Any], Any]]:
    """x / rms(x) along the last axis, and its pullback."""
    inverse = 1 / xp.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(1e-6))
    y = x * inverse

    def pullback(dy: Any) -> Any:
        return inverse * (dy - y * (dy * y).mean(axis=-1, keepdims=True))

    return y, pullback


def weight_gradient(x: Any, dy: Any) -> Any:
    """The gradient of W in y = x @ W, summed over all but the last axis."""
    return x.reshape(-1, x.shape[-1]).T @ dy.reshape(-1, dy.shape[-1])


@dataclass(frozen=True)
class Forward:
    """The logits (b, n, characters) of what comes behind each token, and what the gradients are made of."""

    logits: Any
    y0: Any
    joined: Any
    y1: Any
    hidden: Any
    y2: Any
    pullbacks: tuple[Any, Any, Any, Any]


def forward(xp: Any, p: Parameters, tokens: Any, places: Any, attention: Attention) -> Forward:
    """The model on `tokens` (b, n), which stand at `places`, (n,) or (b, n), of their texts. Each line that needs one keeps its
    pullback."""
    b, n = tokens.shape
    x0 = p["embedding"][tokens] + p["position"][places]
    y0, pull_y0 = normalise(xp, x0)
    qkv = (y0 @ p["qkv"]).reshape(b, n, 3, HEADS, HEAD_DIM)
    q, k, v = (qkv[:, :, i].swapaxes(1, 2) for i in range(3))  # (b, h, n, d): views, nothing is copied
    out, pull_attention = attention(q, k, v)
    joined = out.swapaxes(1, 2).reshape(b, n, WIDTH)
    x1 = x0 + joined @ p["project"]
    y1, pull_y1 = normalise(xp, x1)
    hidden = xp.maximum(y1 @ p["widen"], 0)
    x2 = x1 + hidden @ p["narrow"]
    y2, pull_y2 = normalise(xp, x2)
    return Forward(y2 @ p["logits"], y0, joined, y1, hidden, y2, (pull_y0, pull_attention, pull_y1, pull_y2))


CAUSAL: Attention = partial(cupyflash.attention_vjp, causal=True)


def loss_and_gradients(
    xp: Any, p: Parameters, tokens: Any, targets: Any, places: Any = None, attention: Attention = CAUSAL, total: int | None = None
) -> tuple[float, Parameters]:
    """The mean cross-entropy of predicting `targets` from `tokens`, both (b, n), and its gradient by each parameter.

    Of a part of longer texts: the part's share of the mean over `total` predictions; its tokens stand at `places` (n,), and
    `attention` goes beyond the part.
    """
    b, n = tokens.shape
    places, total = xp.arange(n) if places is None else places, b * n if total is None else total
    found = forward(xp, p, tokens, places, attention)
    pull_y0, pull_attention, pull_y1, pull_y2 = found.pullbacks
    logits = found.logits - found.logits.max(axis=-1, keepdims=True)
    log_sum = xp.log(xp.exp(logits).sum(axis=-1, keepdims=True))
    right = (xp.arange(b)[:, None], xp.arange(n), targets)
    loss = float((log_sum[..., 0] - logits[right]).sum()) / total

    # Backward: forward's lines from the last to the first.
    grad: Parameters = {}
    dlogits = xp.exp(logits - log_sum)
    dlogits[right] -= 1
    dlogits /= total
    grad["logits"] = weight_gradient(found.y2, dlogits)
    dx2 = pull_y2(dlogits @ p["logits"].T)
    grad["narrow"] = weight_gradient(found.hidden, dx2)
    dhidden = (dx2 @ p["narrow"].T) * (found.hidden > 0)
    grad["widen"] = weight_gradient(found.y1, dhidden)
    dx1 = dx2 + pull_y1(dhidden @ p["widen"].T)
    grad["project"] = weight_gradient(found.joined, dx1)
    dout = (dx1 @ p["project"].T).reshape(b, n, HEADS, HEAD_DIM).swapaxes(1, 2)
    dqkv = xp.stack([gradient.swapaxes(1, 2) for gradient in pull_attention(dout)], axis=2).reshape(b, n, 3 * WIDTH)
    grad["qkv"] = weight_gradient(found.y0, dqkv)
    dx0 = dx1 + pull_y0(dqkv @ p["qkv"].T)
    grad["position"] = xp.zeros_like(p["position"])
    grad["position"][places] = dx0.sum(axis=0)
    grad["embedding"] = xp.zeros_like(p["embedding"])
    xp.add.at(grad["embedding"], tokens, dx0)
    return loss, grad


class Adam:
    """Kingma and Ba, arXiv 1412.6980, Algorithm 1."""

    def __init__(self, xp: Any, parameters: Parameters, rate: float = 1e-2, beta1: float = 0.9, beta2: float = 0.99) -> None:
        self.xp, self.rate, self.beta1, self.beta2, self.steps = xp, rate, beta1, beta2, 0
        self.moments = {name: (xp.zeros_like(value), xp.zeros_like(value)) for name, value in parameters.items()}

    def step(self, parameters: Parameters, gradients: Parameters) -> None:
        """Move the parameters, in place."""
        self.steps += 1
        for name, gradient in gradients.items():
            mean, square = self.moments[name]
            mean += (1 - self.beta1) * (gradient - mean)
            square += (1 - self.beta2) * (gradient * gradient - square)
            rate = self.rate * (1 - self.beta2**self.steps) ** 0.5 / (1 - self.beta1**self.steps)
            parameters[name] -= rate * mean / (self.xp.sqrt(square) + 1e-8)


def train(
    xp: Any, steps: int, seed: int, tell: Callable[[str], Any] = print, length: int = LENGTH, batch: int = BATCH
) -> tuple[Parameters, list[float]]:
    """Train on pieces of TEXT, `batch` of `length` a step: the parameters, and the loss of each step."""
    text = np.array([ALPHABET.index(character) for character in TEXT])
    rng = np.random.default_rng(seed)
    parameters = initial(xp, len(ALPHABET), seed, length)
    optimiser = Adam(xp, parameters)
    losses: list[float] = []
    for step in range(steps):
        starts = rng.integers(0, len(text) - length, (batch, 1))
        tokens, targets = (xp.asarray(text[starts + np.arange(length) + shift]) for shift in (0, 1))
        loss, gradients = loss_and_gradients(xp, parameters, tokens, targets)
        optimiser.step(parameters, gradients)
        losses.append(loss)
        if step % 10 == 0 or step == steps - 1:
            tell(f"step {step:>4}  loss {loss:.3f}")
    return parameters, losses


def plot(losses: list[float], path: str) -> None:
    """The loss by step, from that of guessing any character alike."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
    axes.plot(losses, linewidth=1.5)
    axes.axhline(np.log(len(ALPHABET)), color="gray", linestyle="--", linewidth=1)
    axes.text(len(losses) - 1, np.log(len(ALPHABET)) - 0.04, "guessing", color="gray", ha="right", va="top")
    axes.set(xlabel="step", ylabel="cross-entropy (nats a character)", ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def arrays() -> Any:
    """CuPy where there is a GPU, else NumPy."""
    try:
        cupyflash.Device.current()
    except (ImportError, RuntimeError):
        return np
    import cupy

    return cupy


def where(xp: Any) -> str:
    """The device on which it runs."""
    return "the simulated device (NumPy)" if xp is np else "the GPU (CuPy)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", metavar="PNG", help="draw the loss (needs matplotlib)")
    arguments = parser.parse_args()
    xp = arrays()
    print(f"{where(xp)}: {len(TEXT)} characters of {len(ALPHABET)} kinds")
    _, losses = train(xp, arguments.steps, arguments.seed)
    if arguments.plot:
        plot(losses, arguments.plot)


if __name__ == "__main__":
    main()
