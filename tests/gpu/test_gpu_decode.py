"""Decoding on a GPU: the numbers, caches in pages and not, new keys, graphs that are replayed with other lengths, streams."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from chip import DTYPES, choose, on_gpu, on_host, skipping_what_has_no_room

import cupyflash
from cases_decode import CACHES, Arrays, Case, measure
from cupyflash import Mask, Problem
from cupyflash.request.named_scores import one_score
from cupyflash.request.options import not_taken
from cupyflash.schedules import Cache

# One kernel each, on several problems.
KERNELS = choose(
    [(dtype, d, group, n_q) for dtype in DTYPES for d in (64, 128, 256) for group, n_q in ((1, 1), (4, 1), (8, 5), (16, 20))],
    [("float16", 64, 4, 1)],
)
ROOM = choose(4096, 96)


def posed(lengths: tuple[int, ...], n_q: int = 1, group: int = 4, dtype: str = "float16", d: int = 64, **asked: Any) -> Problem:
    asked = {"causal": True} | asked
    kv_heads = choose(2, 1)
    return Problem(len(lengths), group * kv_heads, kv_heads, n_q, ROOM, d, dtype, padded=True, key_lengths=lengths, **asked)


def call_of(case: Case) -> tuple[Arrays, dict[str, Any]]:
    """A case's arrays on the host, where NaN stands for what nobody may read, and on the GPU, (b, n_q, n_q) for a tree mask."""
    arrays, _ = case.arrays()
    given = dict(zip(arrays, on_gpu(*(np.ascontiguousarray(array) for array in arrays.values())), strict=True))
    if case.cache.tree and given["tree_mask"].ndim == 4:
        given["tree_mask"] = given["tree_mask"][:, 0]
    return arrays, given


def asked_of(case: Case) -> dict[str, Any]:
    return {
        **{name: value for name, value in case.problem.options.keywords.items() if name not in not_taken("attention_decode")},
        "softcap": None if case.score is None else case.score.numbers["softcap"],
        "mask": case.mask,
        "num_splits": case.splits,
    }


def check_results(case: Case, arrays: Arrays, given: dict[str, Any], out: Any, lse: Any) -> None:
    """Numbers by the 2x rule; of the caches on the GPU new keys' places have changed, and nothing else."""
    for b, length in enumerate(case.lengths):
        for new, at in enumerate(case.places(arrays, b, length + case.cache.appended)[length:]):
            arrays["k_cache"][at], arrays["v_cache"][at] = arrays["k"][b, :, new], arrays["v"][b, :, new]
    for name, cache in zip(CACHES, on_host(*(given[name] for name in CACHES)), strict=True):
        assert cache.tobytes() == np.ascontiguousarray(arrays[name]).tobytes()
    numbers = measure(*on_host(out), None if lse is None else on_host(lse)[0], case, arrays)
    assert all(each.good for each in numbers.values()), (case, numbers)


def check_case(case: Case) -> None:
    arrays, given = call_of(case)
    with skipping_what_has_no_room():
        out, lse = cupyflash.attention_decode(**given, **asked_of(case), return_lse=True)
    check_results(case, arrays, given, out, lse)


@pytest.mark.parametrize(("dtype", "d", "group", "n_q"), KERNELS)
def test_numbers(dtype: str, d: int, group: int, n_q: int) -> None:
    for lengths in choose([(4096 - n_q, 0, 1000), (1,), (77, 2048)], [(90, 0), (33,)]):
        problem = posed(lengths, n_q, group, dtype, d)
        check_case(Case(problem, Cache(n_q)))
        check_case(Case(problem, Cache(n_q, 16, len(lengths) * (ROOM // 16) + 5), seed=1))


@pytest.mark.parametrize("splits", choose([1, 2, 7, 256, None], [3]))
@pytest.mark.parametrize("page", choose([None, 32, 256], [32]))
def test_whatever_is_asked_for(splits: int | None, page: int | None) -> None:
    """Windows, caps, sinks, trees, new keys across pages, a negative scale."""
    pages = 0 if page is None else 2 * (ROOM // page) + 1
    mask = Mask("k < first or q - k < 30", first=9).form
    for seed, asked in enumerate(({"window": (40, 0), "sinks": True}, {"scale": -0.3, "causal": False, "mask_function": mask})):
        score = None if seed else one_score({"softcap": 5.0})
        problem = posed((ROOM - 40, 30), 5, score=score and score.form, **asked)
        cache = Cache(9, page, pages, tree=seed == 1)
        check_case(Case(problem, cache, splits=splits, tree_each=True, seed=seed))


def test_the_same_bits_every_time() -> None:
    case = Case(posed((ROOM, 17)), splits=7)
    _, given = call_of(case)
    first = on_host(cupyflash.attention_decode(**given, num_splits=7))[0].tobytes()
    for _ in range(choose(20, 1)):
        assert on_host(cupyflash.attention_decode(**given, num_splits=7))[0].tobytes() == first


def test_caches_with_keys_before_heads_and_integers_of_any_width() -> None:
    import cupy

    case = Case(posed((ROOM - 3, 9)), Cache(3))
    arrays, given = call_of(case)
    views = {name: cupy.ascontiguousarray(given[name].swapaxes(1, 2)).swapaxes(1, 2) for name in CACHES}
    on_host(*views.values())
    given |= views | {"cache_seqlens": given["cache_seqlens"].astype(np.int64)}
    out = cupy.empty(given["q"].swapaxes(1, 2).shape, np.float16).swapaxes(1, 2)
    made, lse = cupyflash.attention_decode(**given, out=out, return_lse=True)
    assert made is out
    check_results(case, arrays, given, out, lse)


def test_lengths_and_pages_in_a_list_and_on_the_host() -> None:
    case = Case(posed((ROOM - 3, 9)), Cache(3, 16, 2 * (ROOM // 16)))
    arrays, given = call_of(case)
    given |= {"cache_seqlens": list(case.lengths), "block_table": arrays["block_table"]}
    check_results(case, arrays, given, *cupyflash.attention_decode(**given, return_lse=True))
    given |= {"cache_seqlens": [ROOM - 2, 9]}
    with pytest.raises(ValueError, match=f"between 0 and {ROOM - 3}"):
        cupyflash.attention_decode(**given)
    with pytest.raises(TypeError, match="all CuPy's"):
        cupyflash.attention_decode(**given | {"q": arrays["q"]})


def test_what_only_the_device_knows_is_clamped_and_nothing_outside_is_written() -> None:
    """A GPU's lengths and pages may be anything: all of the caches lies between rows that keep what they had."""
    import cupy

    case = Case(posed((0, 0)), Cache(4, 16, 2 * (ROOM // 16)))
    _, given = call_of(case)
    for name in CACHES:
        around = cupy.full((given[name].shape[0] + 2, *given[name].shape[1:]), 7, np.float16)
        given[name] = around[1:-1]
        given[f"around {name}"] = around
    arounds = [given.pop(f"around {name}") for name in CACHES]
    for lengths, page in (((-5, ROOM), -1), ((2**31 - 1, -(2**31)), 2**31 - 1)):
        given |= {"cache_seqlens": on_gpu(np.array(lengths, np.int32))[0]}
        given["block_table"] = on_gpu(np.full((2, ROOM // 16), page, np.int32))[0]
        out = on_host(cupyflash.attention_decode(**given))[0]
        assert np.isfinite(out.astype(np.float32)).all()
        for around in on_host(*arounds):
            assert (around[[0, -1]] == 7).all()


STEPS = (((40, 0), 3), ((7, ROOM - 2), 4), ((0, 33), 5))
"""Lengths, and the seed of contents and pages, of one replay after the other."""


def step_of(lengths: tuple[int, ...], seed: int) -> Case:
    return Case(posed(lengths, 2), Cache(2, 16, 2 * (ROOM // 16) + 3), splits=5, seed=seed)


def test_a_graph_is_replayed_with_other_lengths_pages_and_contents() -> None:
    """Captured once: nothing is looked at on the host, and what it computes in between nobody else is given."""
    import cupy

    _, given = call_of(step_of((0, 0), 0))
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        cupyflash.attention_decode(**given, num_splits=5, return_lse=True)  # compiles
        stream.synchronize()
        stream.begin_capture()
        try:
            results = cupyflash.attention_decode(**given, num_splits=5, return_lse=True)
        finally:
            graph = stream.end_capture()
        fillers = [cupy.full(size, 7, cupy.float32) for size in choose([1 << 16, 1 << 12, 1 << 8], [1 << 8]) for _ in range(8)]
        for lengths, seed in STEPS:
            case = step_of(lengths, seed)
            arrays, _ = case.arrays()
            for name, array in zip(arrays, on_gpu(*arrays.values()), strict=True):
                given[name][...] = array
            for result in results:
                result[...] = 7
            graph.launch(stream)
            check_results(case, arrays, given, *results)
        assert all(bool((filler == 7).all()) for filler in fillers)


def test_lengths_on_the_host_cannot_be_captured() -> None:
    """Refused before anything is launched; the capture goes on."""
    import cupy

    _, given = call_of(step_of((3, 4), 0))
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        with pytest.raises(ValueError, match="cache_seqlens must be on the GPU while a CUDA graph is captured"):
            cupyflash.attention_decode(**given | {"cache_seqlens": [3, 4]})
        stream.end_capture()


def test_two_streams_at_once() -> None:
    import cupy

    cases = [Case(posed((ROOM - 1, 5)), Cache(1), splits=6, seed=seed) for seed in range(2)]
    calls = [call_of(case) for case in cases]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in cases]
    for _ in range(choose(5, 1)):
        made = []
        for stream, (_, given) in zip(streams, calls, strict=True):
            with stream:
                made.append(cupyflash.attention_decode(**given, num_splits=6, return_lse=True))
        for stream, case, (arrays, given), results in zip(streams, cases, calls, made, strict=True):
            with stream:
                check_results(case, arrays, given, *results)


def test_token_by_token_it_is_attention_over_the_prefix() -> None:
    """Lengths are counted on the GPU; no call is waited for."""
    import cupy

    rng = np.random.default_rng(5)
    tokens = choose(50, 4)
    q, k, v = (rng.standard_normal((2, heads, tokens, 64)).astype(np.float16) for heads in (4, 2, 2))
    whole = on_host(cupyflash.attention(*on_gpu(q, k, v), causal=True))[0]
    caches = [cupy.zeros((9, 2, 16, 64), np.float16) for _ in CACHES]
    (table,) = on_gpu(rng.permutation(9)[:8].reshape(2, 4).astype(np.int32))
    (lengths,) = on_gpu(np.zeros(2, np.int32))
    news = [on_gpu(*(np.ascontiguousarray(array[:, :, [token]]) for array in (q, k, v))) for token in range(tokens)]
    made = []
    for q_new, k_new, v_new in news:
        made.append(cupyflash.attention_decode(q_new, *caches, lengths, k=k_new, v=v_new, block_table=table))
        lengths[...] = lengths + 1
    for token, out in enumerate(on_host(*made)):
        assert np.abs(out.astype(np.float32) - whole[:, :, [token]]).max() < 4e-3
