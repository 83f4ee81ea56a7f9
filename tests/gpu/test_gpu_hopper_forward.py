"""FlashAttention-3's forward on a Hopper GPU: the numbers, what is left to FlashAttention-2, the same bits, graphs, gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from chip import check_backward, check_forward, choose, on_gpu, on_host
from lines import LINES
from test_varlen import check_sequences, packed

import cupyflash
from cupyflash import Device, Problem
from cupyflash.request.options import Options
from cupyflash.schedules import choose as chosen
from yardstick import check_numbers, draw

HALVES = ("float16", "bfloat16")
# One kernel each, on several problems.
KERNELS = choose(
    [(dtype, d, causal) for dtype in HALVES for d in (16, 40, 64, 96, 128, 192, 256) for causal in (False, True)],
    [("float16", 64, False)],
)
LENGTHS = choose(((128, 128), (97, 1025), (1025, 97), (1, 300), (3000, 3000)), ((33, 150),))
N = choose(700, 70)
PLAIN = Problem(1, 2, 1, N, N, 64, "float16")


@pytest.fixture(autouse=True)
def _hopper() -> None:
    capability = Device.current().compute_capability
    if capability != (9, 0):
        pytest.skip("warpgroup products need compute capability 9.0, this GPU has {}.{}".format(*capability))


@pytest.mark.parametrize(("dtype", "d", "causal"), KERNELS)
def test_numbers(dtype: str, d: int, causal: bool) -> None:
    for lengths in LENGTHS:
        check_forward(Problem(2, 4, 2, *lengths, d, dtype, causal=causal), "fa3")


# What restricts the scores, each a kernel of its own.
MASKS: dict[str, dict[str, Any]] = {
    "causal window": {"window": (5, None), "causal": True},
    "window": {"window": (20, 7)},
    "key lengths": {"padded": True},
    "sinks": {"sinks": True, "causal": True},
    **{f"line {place}": {"score": form, "causal": bool(place % 2)} for place, form in enumerate(LINES)},
    "all": {"sinks": True, "padded": True, "causal": True, "window": (60, None)},
}


@pytest.mark.parametrize("masks", choose([*MASKS], ["all"]))
@pytest.mark.parametrize("d_v", choose([48, 200], [48]))
def test_masks(masks: str, d_v: int) -> None:
    for seed, (n_q, n_k) in enumerate(choose([(100, 150), (257, 530)], [(20, 150)])):
        lengths = {"key_lengths": (n_k, n_k // 2)} if MASKS[masks].get("padded") else {}
        check_forward(Problem(2, 4, 2, n_q, n_k, 64, "float16", head_dim_v=d_v, **MASKS[masks], **lengths), "fa3", seed=seed)


@pytest.mark.parametrize("tiling", choose([(128, 16), (128, 128), (192, 48), (192, 128)], [(128, 16)]))
def test_blocks_that_are_asked_for(tiling: tuple[int, int]) -> None:
    check_forward(PLAIN, "fa3", tiling)


def test_packed_sequences() -> None:
    seqlens = choose(((5, 17), (130, 1000), (0, 9), (70, 0), (700, 700)), ((5, 17), (0, 9), (7, 0)))
    q, k, v, cu_q, cu_k = packed(seqlens, 4, 2, 64, 64, "float16")
    out, lse = on_host(*cupyflash.attention_varlen(*on_gpu(q, k, v), cu_q, cu_k, causal=True, return_lse=True))
    check_sequences(out, lse, q, k, v, seqlens, Options(causal=True))


def test_by_default_it_is_what_the_model_chooses_and_what_tma_does_not_take_is_not_its() -> None:
    arrays = draw(PLAIN)
    q, k, v = on_gpu(*arrays)
    algorithm = chosen(PLAIN, Device.current()).algorithm
    assert algorithm == "fa3"
    assert cupyflash.attention(q, k, v).tobytes() == cupyflash.attention(q, k, v, algorithm=algorithm).tobytes()
    off = on_gpu(*(np.pad(array, [*[(0, 0)] * 3, (1, 7)]) for array in arrays))  # addresses 2 bytes off multiples of 16
    check_numbers(*on_host(cupyflash.attention(*(array[..., 1:65] for array in off))), None, *arrays)
    with pytest.raises(ValueError, match="TMA takes"):
        cupyflash.attention(*(array[..., 1:65] for array in off), algorithm="fa3")


def test_strided_views_and_out_without_copies() -> None:
    import cupy

    arrays = on_gpu(*draw(Problem(2, choose(30, 10), choose(30, 10), 4, 4, 64, "float16")))
    q, k, v = (array.swapaxes(1, 2) for array in arrays)
    out = cupy.empty((2, choose(30, 10), 4, 64), cupy.float16).swapaxes(1, 2)
    assert cupyflash.attention(q, k, v, out=out, algorithm="fa3") is out
    check_numbers(*on_host(out), None, *on_host(q, k, v))


def test_the_same_bits_every_time_and_in_a_graph() -> None:
    import cupy

    q, k, v = on_gpu(*draw(PLAIN))
    first = cupyflash.attention(q, k, v, algorithm="fa3").tobytes()
    assert all(cupyflash.attention(q, k, v, algorithm="fa3").tobytes() == first for _ in range(choose(10, 1)))
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        out = cupyflash.attention(q, k, v, algorithm="fa3")
        graph = stream.end_capture()
        for _ in range(2):
            out[...] = 7
            graph.launch()
            assert on_host(out)[0].tobytes() == first


def test_its_log_sum_exps_are_what_the_backward_takes() -> None:
    check_backward(PLAIN, "auto")
