"""Score functions on the chip: numbers and gradients by the 2x rule, against NumPy's evaluation of the same line."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from chip import check_backward, check_forward, choose, on_gpu, on_host, score_on_gpu
from lines import LINES
from test_varlen import check_sequences, packed

import cupyflash
from cupyflash import Options, Problem, launcher
from cupyflash.schedules import Cache
from cupyflash.sim.yardstick import draw_decode, draw_score, measure_decode

PLACES = choose([*range(len(LINES))], [2])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", choose(("float16", "float32"), ("float16",)))
@pytest.mark.parametrize("algorithm", choose(("fa2", "fa1", "standard"), ("fa2",)))
def test_numbers(algorithm: str, dtype: str, place: int) -> None:
    for d in choose((40, 64, 128), (16,)):
        problem = Problem(2, 4, 2, *choose((257, 513), (33, 40)), d, dtype, causal=bool(place % 2), score=LINES[place])
        check_forward(problem, algorithm)
        check_backward(problem, algorithm)


@pytest.mark.parametrize("place", PLACES)
def test_packed_sequences(place: int) -> None:
    seqlens = choose(((5, 17), (130, 1000), (0, 9), (70, 0), (700, 700)), ((5, 17), (0, 9), (7, 0)))
    longest = max(n for n, _ in seqlens), max(n for _, n in seqlens)
    problem = Problem(len(seqlens), 4, 2, *longest, 64, "float16", score=LINES[place])
    score = draw_score(problem)
    assert score is not None
    q, k, v, cu_q, cu_k = packed(seqlens, 4, 2, 64, 64, "float16")
    made = cupyflash.attention_varlen(*on_gpu(q, k, v), cu_q, cu_k, causal=True, score=score_on_gpu(score), return_lse=True)
    check_sequences(*on_host(*made), q, k, v, seqlens, Options(causal=True, score=score.form), score)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("splits", choose([1, 7, None], [2]))
def test_decoding(place: int, splits: int | None) -> None:
    lengths, room = choose(((3000, 77), 4096), ((40, 7), 64))
    asked: dict[str, Any] = {"padded": True, "key_lengths": lengths, "causal": True, "score": LINES[place]}
    decoding = draw_decode(Problem(2, 6, 2, 3, room, 64, "float16", **asked), Cache(2), v_mean=1.0)
    assert decoding.score is not None
    given = dict(zip(decoding.arrays, on_gpu(*decoding.arrays.values()), strict=True))
    score = score_on_gpu(decoding.score)
    out, lse = on_host(*cupyflash.attention_decode(**given, score=score, num_splits=splits, return_lse=True))
    numbers = measure_decode(out, lse, decoding.sequences)
    assert all(each.good for each in numbers.values()), numbers


def test_another_cap_is_another_number_of_the_same_prepared_call() -> None:
    q, k, v = on_gpu(*np.random.default_rng(0).standard_normal((3, 2, 40, 64)).astype(np.float16))
    first = cupyflash.attention(q, k, v, softcap=0.5)
    prepared = launcher.KEPT.prepared
    capped, free, again = on_host(first, *(cupyflash.attention(q, k, v, softcap=cap) for cap in (1e6, 0.5)))
    assert capped.tobytes() == again.tobytes() != free.tobytes()
    assert launcher.KEPT.prepared == prepared  # numbers come with the launch
