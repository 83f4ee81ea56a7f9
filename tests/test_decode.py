"""Decoding: numbers by the 2x rule, theory == replay == execution, no finding, and of the caches only new keys' places change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

import cupyflash
from cases_decode import CACHES, Arrays, Case, cases, check, measure
from cupyflash import Device, Problem, plan
from cupyflash.launch.binding import argument_values
from cupyflash.launch.launcher import CACHED, TENSORS
from cupyflash.schedules import Cache, decode_tiles, plan_decode
from cupyflash.sim import execute, replay
from cupyflash.sim.execution import allocate, execute_decode, run_kernels
from cupyflash.sim.numbers.reference import reference
from cupyflash.sim.numbers.yardstick import drawn
from cupyflash.sim.numbers.yardstick import measure as measure_attention
from cupyflash.sim.theory import traffic
from suites import sweep, wide

A100 = Device.named("A100-40GB")


@pytest.mark.parametrize("pages", [wide((None,)), wide((16,)), (32, 48, 80, 256)], ids=["together", "small pages", "pages"])
@sweep(1, 3)
def test_random_problems(data: st.DataObject, pages: Sequence[int | None]) -> None:
    for case in data.draw(cases(pages)):
        check(case)


def posed(lengths: Sequence[int], room: int, n_q: int = 3, d: int = 64, group: int = 4, **asked: Any) -> Problem:
    """A problem with `lengths` cached keys, and two key heads, in float16."""
    asked = {"causal": True} | asked
    return Problem(len(lengths), 2 * group, 2, n_q, room, d, "float16", padded=True, key_lengths=tuple(lengths), **asked)


SPLIT = Case(posed((230, 0, 97), 240), Cache(5, 16, 48, tree=True), splits=7, blocks=(16, 3), tree_each=True)
"""Up to fifteen blocks of keys in seven splits, new keys in the last, which hold the masked ones too."""


@pytest.mark.wide
def test_long_sums_of_floats() -> None:
    """One sum of 2,048 float32 products has twice the allowed error."""
    check(Case(replace(posed((2048,), 2048, 4, 16), dtype="float32"), splits=1))


@pytest.mark.wide
@pytest.mark.parametrize("orders", [1, wide(2)])
def test_the_same_bits_each_time_and_in_every_order(orders: int) -> None:
    case = replace(SPLIT, problem=posed((40, 0), 48), cache=replace(SPLIT.cache, pages=7))
    first, _ = check(case)
    for order in (None, *range(orders)):
        found, _ = check(replace(case, order=order))
        assert found.out.tobytes() == first.out.tobytes() and found.traffic == first.traffic
        assert found.lse is not None and first.lse is not None and found.lse.tobytes() == first.lse.tobytes()


@pytest.mark.wide
@pytest.mark.parametrize("splits", [(2, 256), wide((1, 3, 15, 100))])
def test_however_many_splits_only_rounding_differs(splits: tuple[int, ...]) -> None:
    first, numbers = check(SPLIT)
    for each in splits:
        found, _ = check(replace(SPLIT, splits=each))
        difference = np.abs(found.out.astype(np.float64) - first.out.astype(np.float64)).max()
        assert difference <= numbers["O"].allowed
        assert found.lse is not None and first.lse is not None
        assert np.allclose(found.lse, first.lse, rtol=0, atol=1e-5)


@pytest.mark.wide
@pytest.mark.parametrize(("splits", "blocks"), [(1, (64, 2)), wide(2, (32, 2)), wide(1, (16, 4))])
def test_more_pages_than_their_places_are_known_at_a_time(splits: int, blocks: tuple[int, int]) -> None:
    """Places of pages are looked up while the ring of 128 goes round, twice and more."""
    problem = posed((2330,), 16 * 150, d=16, group=1)
    check(Case(problem, Cache(20, 16, 151), splits=splits, blocks=blocks))


@pytest.mark.parametrize("page", [None, wide(16)])
def test_values_that_only_the_device_knows_are_clamped(page: int | None) -> None:
    """Lengths out of range, and pages: as the nearest ones, and never a write outside of the cache."""
    n, new, pages = 48, 3, 0 if page is None else 12
    given = Case(posed((0,) * 4, n, d=16), Cache(new, page, pages), splits=2, blocks=(16, 2), seed=4)
    arrays, _ = given.arrays()
    schedule = given.schedule_of(arrays)
    taken = np.array([0, n - new, 0, n - new])
    for name in CACHES:
        arrays[name][...] = np.random.default_rng(1).standard_normal(arrays[name].shape)
    if page is not None:
        arrays["block_table"] = np.array([[0, 1, 2], [3, 4, 5], [6, 7, 8], [-5, 9, 2**31 - 1]], np.int32)
    lengths = np.array([-1, n - new + 1, -(2**31), 2**31 - 1], np.int32)
    before = {name: arrays[name].copy() for name in CACHES}
    out, lse = np.empty((4, 8, 3, 16), np.float16), np.empty((4, 8, 3), np.float32)
    kernels = {(TENSORS | CACHED).get(name, name): array for name, array in arrays.items()}
    spaces = allocate(schedule)
    values = argument_values(schedule, {**kernels, "cache_seqlens": lengths, "O": out, "L": lse, **spaces})
    _, _, findings = run_kernels(schedule, values, ("O", "L", *spaces))
    assert not (findings if page is None else [each for each in findings if each.kind != "race"])
    if page is not None:  # a bad page is another sequence's, for which it has other contents
        return
    known = replace(given, problem=posed(tuple(taken.tolist()), n, d=16))
    for name, added in zip(CACHES, "kv", strict=True):
        for b, length in enumerate(taken):
            before[name][b, :, length : length + new] = arrays[added][b]
        assert before[name].tobytes() == arrays[name].tobytes()
    assert all(each.good for each in measure(out, lse, known, arrays).values())


def test_keys_and_values_are_read_once_whatever_the_splits() -> None:
    """If the rows of a group fit a tile, each key head's existing rows are read once, and no others."""
    lengths = (700, 0, 4093)
    for n_q, group, page, splits in ((1, 8, 16, None), (4, 4, None, 3), (16, 16, 80, 256), (1, 1, None, 1)):
        problem = posed(lengths, 4160, n_q, 128, group)
        cache = Cache(n_q, page, 0 if page is None else 999)
        moved = traffic(plan_decode(problem, A100, cache, num_splits=splits))
        for tensor in "KV":
            assert moved[tensor].read_bytes == sum(lengths) * 2 * 128 * 2
            assert moved[tensor].write_bytes == moved[f"{tensor}_new"].read_bytes == 3 * n_q * 2 * 128 * 2


def test_what_would_spill_is_rejected() -> None:
    """Two tiles of rows a warp at d 128, whose O has half of the registers, beside S of 64 keys."""
    problem = posed((0,), 4096, 20, 128, 16)
    found = {(each.config.row_tiles, each.config.block_cols): each.rejected for each in decode_tiles.candidates(problem, A100)}
    assert found[2, 64] is not None and "registers: a thread needs about 272 of 255" in found[2, 64]
    assert found[2, 32] is None


@pytest.mark.parametrize(
    ("shape", "asked"),
    [
        ((1, 2, 1, 3, 150, 16), {"causal": True}),
        wide((2, 8, 2, 5, 300, 64), {"window": (70, 3), "sinks": True}),
        wide((2, 4, 4, 1, 200, 40), {"scale": -0.2}),
        wide((1, 16, 1, 20, 90, 128), {}),
    ],
)
def test_attention_takes_it_for_all_keys_of_a_sequence(shape: tuple[int, ...], asked: dict[str, Any]) -> None:
    problem = Problem(*shape, "float16", **asked)
    schedule, inputs = plan(problem, replace(A100, sm_count=8), "decode", lse=True), drawn(problem, 0, 1.0)
    execution = execute(schedule, *inputs.qkv, **inputs.beside)
    assert execution.findings == () and traffic(schedule) == replay(schedule) == execution.traffic
    numbers = measure_attention(execution.out, execution.lse, inputs)
    assert all(each.good for each in numbers.values()), numbers


# --- the call


def call(rows_first: bool = False, page: int | None = None) -> Arrays:
    """A call's arrays: (2, 4, 3, 16) in caches of two heads with room for 64 keys, or in four of five pages."""
    rng = np.random.default_rng(3)
    room = (2, 2, 64, 16) if page is None else (5, 2, page, 16)
    if rows_first:
        caches = [rng.standard_normal((room[0], room[2], 2, 16)).astype(np.float16).swapaxes(1, 2) for _ in CACHES]
    else:
        caches = [rng.standard_normal(room).astype(np.float16) for _ in CACHES]
    made = {"q": rng.standard_normal((2, 4, 3, 16)).astype(np.float16)} | dict(zip(CACHES, caches, strict=True))
    made |= {name: rng.standard_normal((2, 2, 2, 16)).astype(np.float16) for name in "kv"}
    made["cache_seqlens"] = np.array([20, 30])
    return made | ({} if page is None else {"block_table": np.array([[4, 0], [2, 3]], np.int32)})


@pytest.mark.parametrize("page", [None, wide(32)])
def test_the_call(page: int | None) -> None:
    """Strided caches and a strided O; lengths in a list; nothing of the caller's is changed but O and the caches."""
    arrays = call(rows_first=True, page=page)
    before = {name: array.copy() for name, array in arrays.items()}
    out = np.zeros((2, 3, 4, 40), np.float16).swapaxes(1, 2)[..., 8:24]
    made, lse = cupyflash.attention_decode(
        **{**arrays, "cache_seqlens": before["cache_seqlens"].tolist()}, out=out, return_lse=True, num_splits=3
    )
    assert made is out and lse.shape == (2, 4, 3) and lse.dtype == np.float32
    cache = Cache(2, page, 0 if page is None else 5)
    case = Case(Problem(2, 4, 2, 3, 64, 16, "float16", causal=True, padded=True, key_lengths=(20, 30)), cache)
    numbers = measure(out, lse, case, arrays)
    assert all(each.good for each in numbers.values()), numbers
    for b, length in enumerate(case.lengths):
        for new, at in enumerate(case.places(arrays, b, length + 2)[length:]):
            for name, added in zip(CACHES, "kv", strict=True):
                assert arrays[name][at].tobytes() == arrays[added][b, :, new].tobytes()
                before[name][at] = arrays[added][b, :, new]
    assert all(array.tobytes() == arrays[name].tobytes() for name, array in before.items())


@pytest.mark.wide
def test_token_by_token_it_is_attention_over_the_prefix() -> None:
    """Each call appends a key, of which the next ones know."""
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((1, heads, 4, 16)).astype(np.float16) for heads in (4, 2, 2))
    k_cache, v_cache = (np.full((3, 2, 16, 16), np.nan, np.float16) for _ in CACHES)
    table = np.array([[1]], np.int32)
    whole, _ = reference(q, k, v, causal=True)
    for token in range(4):
        one = slice(token, token + 1)
        made = cupyflash.attention_decode(
            q[:, :, one], k_cache, v_cache, [token], k=k[:, :, one], v=v[:, :, one], block_table=table
        )
        assert np.abs(made - whole[:, :, one]).max() < 2e-3
    assert (k_cache[1, :, :4] == k[0]).all() and np.isnan(k_cache[[0, 2]]).all() and np.isnan(k_cache[1, :, 4:]).all()


@pytest.mark.wide
def test_a_cache_of_more_elements_than_32_bits_count() -> None:
    """Its first pages and its last; the others take no memory."""
    shape = (2**31 // (16 * 64) + 4, 1, 16, 64)
    k_cache, v_cache = (np.empty(shape, np.float16) for _ in CACHES)
    table, rng = np.array([[shape[0] - 1, 3, shape[0] - 2]], np.int32), np.random.default_rng(0)
    pages = {name: rng.standard_normal((3, 1, 16, 64)).astype(np.float16) for name in "kv"}
    k_cache[table[0]], v_cache[table[0]] = pages["k"], pages["v"]
    q, k, v = (rng.standard_normal((1, heads, 1, 64)).astype(np.float16) for heads in (2, 1, 1))
    out = cupyflash.attention_decode(q, k_cache, v_cache, [40], k=k, v=v, block_table=table)
    assert (k_cache[table[0, 2], :, 8] == k[0, :, 0]).all() and (v_cache[table[0, 2], :, 8] == v[0, :, 0]).all()
    whole = [np.concatenate([*pages[name][:2, 0], pages[name][2, 0, :8], new[0, 0]])[None] for name, new in (("k", k), ("v", v))]
    assert np.abs(out[0] - reference(q[0], *whole)[0]).max() < 2e-3


def test_nothing_to_see_and_nothing_to_do() -> None:
    arrays = call()
    nothing = {"k": None, "v": None, "num_splits": 1}
    out, lse = cupyflash.attention_decode(**arrays | nothing | {"cache_seqlens": [0, 0]}, return_lse=True)
    assert not out.any() and np.isneginf(lse).all()
    empty = {name: arrays[name][:, :, :0] for name in CACHES} | {"cache_seqlens": [0, 0]}
    out, lse = cupyflash.attention_decode(**arrays | nothing | empty, return_lse=True)
    assert not out.any() and np.isneginf(lse).all()
    none = {name: array[:0] for name, array in arrays.items()}
    assert cupyflash.attention_decode(**none).shape == (0, 4, 3, 16)
    none = {name: array[:, :0] if array.ndim == 4 else array for name, array in arrays.items()}
    assert cupyflash.attention_decode(**none).shape == (2, 0, 3, 16)


def test_the_schedule_s_arrays_and_no_others_are_executed() -> None:
    given, _ = SPLIT.arrays()
    with pytest.raises(ValueError, match="the arrays pose Cache"):
        execute_decode(SPLIT.schedule, **{name: array for name, array in given.items() if name != "tree_mask"})
    with pytest.raises(ValueError, match="the arrays pose Problem"):
        execute_decode(SPLIT.schedule, **given | {"q": given["q"][:, :, :2], "tree_mask": given["tree_mask"][..., :2, :2]})
