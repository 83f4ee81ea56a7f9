"""Trains on a text that is too long for one rank:  mpiexec -n 2 python examples/long_context.py [--check]

The character model of train_characters.py, with one text of `--length` characters a step. A rank has room for `--budget` of
them, so the text is cut over the ranks, zigzag; attention goes round them (`ring_attention_vjp`), everything else is of each token
by itself, and gradients of the parameters, which all ranks have, are summed. `--check` trains on one device as well and compares
the losses.

On GPUs each rank takes one, and K and V travel by MPI; without one NumPy arrays run on the simulated device (about half a minute).
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any

import numpy as np
import train_characters as model
from mpi4py import MPI

from cupyflash.distributed import ring_attention_vjp, shard

Parameters = dict[str, Any]


def summed(xp: Any, comm: MPI.Comm, gradients: Parameters) -> Parameters:
    """The sums over all ranks."""
    found: Parameters = {}
    for name, gradient in gradients.items():
        own = gradient if xp is np else gradient.get()
        whole = np.empty_like(own)
        comm.Allreduce(own, whole)
        found[name] = xp.asarray(whole)
    return found


def train(xp: Any, comm: MPI.Comm, steps: int, length: int, budget: int, seed: int = 0) -> list[float]:
    """The loss of each step; ValueError where a rank has no room for its part."""
    text = np.array([model.ALPHABET.index(character) for character in model.TEXT])
    rng = np.random.default_rng(seed)
    parameters = model.initial(xp, len(model.ALPHABET), seed, length)
    optimiser = model.Adam(xp, parameters)
    places = shard(xp.arange(length), comm, axis=0)
    if len(places) > budget:
        raise ValueError(f"a rank has room for {budget} characters, {length} over {comm.size} would take {len(places)} each")
    attention = partial(ring_attention_vjp, comm=comm, causal=True)
    losses = []
    for _ in range(steps):
        start = int(rng.integers(0, len(text) - length))
        tokens, targets = (xp.asarray(text[start + shift : start + shift + length])[places][None] for shift in (0, 1))
        share, gradients = model.loss_and_gradients(xp, parameters, tokens, targets, places, attention, length)
        optimiser.step(parameters, summed(xp, comm, gradients))
        losses.append(comm.allreduce(share))
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--budget", type=int, default=128)
    parser.add_argument("--check", action="store_true", help="train on one device, too, and compare")
    arguments = parser.parse_args()
    comm, xp = MPI.COMM_WORLD, model.arrays()
    if xp is not np:
        xp.cuda.Device(comm.rank % xp.cuda.runtime.getDeviceCount()).use()
    losses = train(xp, comm, arguments.steps, arguments.length, arguments.budget)
    if comm.rank:
        return 0
    print(f"{model.where(xp)}: {arguments.length} characters over {comm.size} ranks")
    alone = train(xp, MPI.COMM_SELF, arguments.steps, arguments.length, arguments.length) if arguments.check else None
    for step, loss in enumerate(losses):
        print(f"step {step:>4}  loss {loss:.5f}" + ("" if alone is None else f"  on one device {alone[step]:.5f}"))
    return int(alone is not None and not np.allclose(losses, alone, rtol=1e-5))


if __name__ == "__main__":
    sys.exit(main())
