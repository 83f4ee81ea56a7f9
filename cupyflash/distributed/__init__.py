"""Attention of sequences that are cut over devices: ring attention over MPI, NCCL, or threads.

    out = ring_attention(q, k, v, comm, causal=True)

on each rank, with its part of the sequence (`shard` cuts, `unshard` joins). `Communicator` is the interface of a transport.
"""

from __future__ import annotations

from cupyflash.distributed.calls import (
    ring_attention,
    ring_attention_backward,
    ring_attention_varlen,
    ring_attention_varlen_backward,
    ring_attention_vjp,
)
from cupyflash.distributed.communicator import Communicator, RankFailed, Request
from cupyflash.distributed.layout import parts
from cupyflash.distributed.sharding import shard, unshard
from cupyflash.distributed.threads import threads

__all__ = [
    "Communicator",
    "RankFailed",
    "Request",
    "parts",
    "ring_attention",
    "ring_attention_backward",
    "ring_attention_varlen",
    "ring_attention_varlen_backward",
    "ring_attention_vjp",
    "shard",
    "threads",
    "unshard",
]
