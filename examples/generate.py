"""Trains the character model and lets it write, token by token, from a cache in pages:  python examples/generate.py [--check]

The model is that of train_characters.py, for longer texts. Each prompt is one call of `attention_decode`, whose queries are all of
its characters; then all texts go on together, a character a call, which also appends that character's K and V to the cache. A text
gets another page when its last one is full, from a list of those that are free. `--check` compares each call with plain attention
over the text so far. On a GPU all of it runs on CuPy arrays, without one on NumPy arrays and the simulated device, where the
training takes one or two minutes and the writing some seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
from train_characters import ALPHABET, BATCH, HEAD_DIM, HEADS, Parameters, arrays, forward, train, where

import cupyflash

PAGE = 16  # keys
LENGTH = 64  # of a text at most
SHARPNESS = 2.0  # by which logits are multiplied before a character is drawn
PROMPTS = ("Shall I", "So long as men", "Thy")


class Cache:
    """K and V of several texts in pages, which go from a list of free ones to whichever text needs another.

    `table` (texts, pages of a text) says which page is where in a text, `lengths` how many characters each has in the cache.
    """

    def __init__(self, xp: Any, texts: int, length: int, pages: int) -> None:
        self.xp = xp
        self.k, self.v = (xp.zeros((pages, HEADS, PAGE, HEAD_DIM), np.float32) for _ in range(2))
        self.free = list(range(pages))
        self.table = np.zeros((texts, -(-length // PAGE)), np.int32)
        self.lengths = np.zeros(texts, np.int32)

    def attend(self, q: Any, k: Any, v: Any, texts: slice) -> Any:
        """O of the newest characters of these texts, whose k and v are put into the cache. IndexError where no page is free."""
        new = k.shape[2]
        for text in range(len(self.lengths))[texts]:
            length = int(self.lengths[text])
            for place in range(-(-length // PAGE), -(-(length + new) // PAGE)):
                self.table[text, place] = self.free.pop()
        table, lengths = (self.xp.asarray(each[texts]) for each in (self.table, self.lengths))
        out = cupyflash.attention_decode(q, self.k, self.v, lengths, k=k, v=v, block_table=table)
        self.lengths[texts] += new
        return out


def plain(xp: Any, p: Parameters, text: Sequence[int]) -> Any:
    """O (h, d) of a text's last character: plain attention over all of the text, nothing from a cache."""
    found = []

    def attention(q: Any, k: Any, v: Any) -> tuple[Any, None]:
        scores = q[0, :, -1:] @ k[0].swapaxes(1, 2) / HEAD_DIM**0.5  # (h, 1, n)
        weights = xp.exp(scores - scores.max(axis=-1, keepdims=True))
        found.append((weights @ v[0] / weights.sum(axis=-1, keepdims=True))[:, 0])
        return q, None

    forward(xp, p, xp.asarray([text]), xp.arange(len(text)), attention)
    return found[0]


class Writer:
    """Texts that grow together: their characters, by number, and the cache of what was read of them.

    `differences` has, where they are asked for, the largest one of each call's O from plain attention's.
    """

    def __init__(self, xp: Any, p: Parameters, cache: Cache, check: bool) -> None:
        self.xp, self.p, self.cache, self.check = xp, p, cache, check
        self.texts: list[list[int]] = [[] for _ in cache.lengths]
        self.differences: list[float] = []

    def read(self, texts: slice, tokens: np.ndarray) -> np.ndarray:
        """Puts tokens (texts, n) behind these texts: the logits (texts, characters) of what follows."""
        for text, new in zip(self.texts[texts], tokens.tolist(), strict=True):
            text += new
        places = self.cache.lengths[texts, None] + np.arange(tokens.shape[1])

        def attention(q: Any, k: Any, v: Any) -> tuple[Any, None]:
            out = self.cache.attend(q, k, v, texts)
            if self.check:
                right = self.xp.stack([plain(self.xp, self.p, text) for text in self.texts[texts]])
                self.differences.append(float(abs(out[:, :, -1] - right).max()))
            return out, None

        logits = forward(self.xp, self.p, self.xp.asarray(tokens), self.xp.asarray(places), attention).logits[:, -1]
        return logits if self.xp is np else logits.get()


def drawn(random: np.random.Generator, logits: np.ndarray) -> np.ndarray:
    """A character (texts, 1) for each row of logits, at random (Gumbel's trick)."""
    return (SHARPNESS * logits + random.gumbel(size=logits.shape)).argmax(axis=-1)[:, None]


def generate(
    xp: Any, p: Parameters, prompts: Sequence[str], count: int, seed: int = 0, check: bool = False
) -> tuple[list[str], list[float]]:
    """Generate `count` characters after each prompt: the texts, and with `check` each call's difference."""
    length, unknown = p["position"].shape[0], set("".join(prompts)) - set(ALPHABET)
    if unknown or "" in prompts:
        raise ValueError(f"prompts must have a character each, of those that are in the text, got {list(prompts)}")
    if not 0 <= count <= length - max(map(len, prompts)):
        raise ValueError(f"count must be at least 0, and with the longest prompt at most {length}, got {count}")
    pages = sum(-(-(len(prompt) + count) // PAGE) for prompt in prompts)
    writer = Writer(xp, p, Cache(xp, len(prompts), length, pages), check)
    random = np.random.default_rng(seed)
    tokens = [np.array([[ALPHABET.index(character) for character in prompt]]) for prompt in prompts]
    logits = np.concatenate([writer.read(slice(text, text + 1), each) for text, each in enumerate(tokens)])
    for _ in range(count):
        logits = writer.read(slice(None), drawn(random, logits))
    return ["".join(ALPHABET[token] for token in text) for text in writer.texts], writer.differences


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="*", default=PROMPTS, help=f"default: {', '.join(map(repr, PROMPTS))}")
    parser.add_argument("--count", type=int, default=48, help="characters that are written behind each prompt")
    parser.add_argument("--steps", type=int, default=150, help="of training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="compare each call with plain attention over the text so far")
    given = parser.parse_args(argv)
    xp = arrays()
    print(f"{where(xp)}: training on texts of {LENGTH} characters")
    parameters, _ = train(xp, given.steps, given.seed, length=LENGTH, batch=BATCH // 2)
    texts, differences = generate(xp, parameters, given.prompts, given.count, given.seed, given.check)
    print(*(f"[{number}] {text!r}" for number, text in enumerate(texts)), sep="\n")
    if given.check:
        print(f"{len(differences)} calls, the largest difference from attention over the whole text: {max(differences):.1e}")


if __name__ == "__main__":
    main()
