"""Attention over ranks that are threads: the ring against one whole call, positions, messages, layouts."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

import cupyflash
from cupyflash import Mask, Problem, Score, plan
from cupyflash.arrays import of_heads
from cupyflash.distributed import (
    parts,
    shard,
    threads,
    unshard,
)
from cupyflash.distributed.communicator import as_communicator
from cupyflash.distributed.positions import NUMBERS, numbers_of_part, of_part
from cupyflash.expressions.evaluate import evaluate, positions
from cupyflash.request.options import Band, Options
from cupyflash.schedules import plan_backward
from cupyflash.sim import replay, theory
from cupyflash.sim.numbers.inputs import Inputs
from cupyflash.sim.numbers.reference import reference, reference_gradients
from cupyflash.sim.numbers.yardstick import measure, measure_gradients
from problems import reach
from rings import A100, LAYOUTS, arrays, over_ranks, plain_backward, plain_forward, plain_pieces, refusals  # noqa: F401 (a fixture)
from suites import sweep

side = st.none() | st.integers(0, 20) | st.integers(0, 300)


@sweep(
    12,
    100,
    ranks=st.integers(1, 9),
    n_q=st.integers(0, 330),
    n_k=st.none() | st.integers(0, 330),
    layout=st.sampled_from(LAYOUTS),
    causal=st.booleans(),
    window=st.none() | st.tuples(side, side),
    gather=st.booleans(),
)
def test_any_ring(
    ranks: int, n_q: int, n_k: int | None, layout: str, causal: bool, window: Any, gather: bool, plainly: None
) -> None:
    """The whole is one device's to float32's rounding: ranks that do not divide, empty parts, windows that end the ring."""
    q, k, v, dout = arrays(n_q, n_q if n_k is None else n_k, d=4, dtype=np.float32)
    options = {"causal": causal, "window": window and reach(causal, *window)}
    (out, lse, *made), _ = over_ranks(ranks, q, k, v, dout, layout=layout, gather_kv=gather, **options)
    expected = reference(q, k, v, **options)
    assert np.allclose(out, expected[0], atol=1e-5) and np.allclose(lse, expected[1], atol=1e-5)
    gradients = reference_gradients(dout, q, k, v, **options)
    for name, gradient in zip(("dQ", "dK", "dV"), made, strict=True):
        assert np.allclose(gradient, gradients[name], atol=3e-5), name


def check(ranks: int, given: list[np.ndarray], said: Any = None, **options: Any) -> None:
    """Numbers by the 2x rule against float64; `said` is what a mask function says, as an array."""
    asked = {name: value for name, value in options.items() if name not in ("layout", "gather_kv", "deterministic")}
    (out, lse, *made), shares = over_ranks(ranks, *given, **options)
    inputs = Inputs.of(*given[:3], **(asked | ({} if said is None else {"mask": said})))
    numbers = measure(out, lse, inputs)
    numbers |= measure_gradients(dict(zip(("dQ", "dK", "dV"), made, strict=True)), given[3], inputs)
    assert all(each.good for each in numbers.values()), numbers
    if "sinks" in options:
        expected = of_heads(reference_gradients(given[3], *given[:3], **asked)["dsinks"])
        # D is made of an O that was rounded to q's dtype twice: at most a unit of its last place off in each product
        assert np.allclose(sum(shares), expected, atol=2**-11 * np.abs(given[3] * out).sum())


SLOPES = np.array([0.1, 0.02], np.float32)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("ranks", "n_q", "n_k", "options"),
    [
        (8, 150, 150, {"causal": True, "layout": "contiguous", "gather_kv": True, "sinks": np.array([0.5, -1], np.float32)}),
        (2, 64, 90, {"window": (40, 10), "dropout": 0.25, "seed": 11, "deterministic": True}),
    ],
)
def test_on_the_simulated_device(ranks: int, n_q: int, n_k: int, options: dict[str, Any]) -> None:
    check(ranks, arrays(n_q, n_k), **options)


@pytest.mark.wide
def test_functions_see_the_whole() -> None:
    ids = np.repeat([0, 1, 2], [30, 40, 10]).astype(np.int32)
    said = (ids[:, None] == ids) & np.tri(80, dtype=bool)
    mask = Mask("document[q] == document[k] and k <= q", document=ids)
    check(2, arrays(80, 80), said, mask=mask, alibi_slopes=SLOPES, softcap=4.0)


@sweep(20, 200, data=st.data())
def test_a_part_of_a_function_is_the_function_of_the_whole(data: st.DataObject) -> None:
    text = data.draw(
        st.sampled_from(
            ["s + q - k", "s + row * 2 + n_q", "where(q >= k, s, first_row)", "s + table[k] * n_k", "s + other[q, k % 5]", "s * 2"]
        )
    )
    values: dict[str, Any] = {"table": np.arange(60.0, dtype=np.float32), "other": np.arange(300).reshape(60, 5), "first_row": 9}
    own = {name: value for name, value in values.items() if name in text}
    form = Score(text, **own).form
    part, names = of_part(form)
    assert set(names.values()).isdisjoint(own) and {one.name for one in part.captured} == {*own, *names.values()}
    n_q, row, key = data.draw(st.integers(1, 60)), data.draw(st.integers(0, 30)), data.draw(st.integers(0, 30))
    whole = {"b": 1, "h": 1, "kv_h": 1, "row": n_q, "k": 60}
    sizes = whole | {"row": max(0, n_q - row), "k": 60 - key}
    if not all(sizes.values()):
        return
    scores = np.random.default_rng(0).standard_normal((1, 1, n_q, 60))
    expected = evaluate(form.tree, positions(whole) | own | {"s": scores}, np.float64)
    numbers = numbers_of_part(names, row, key, n_q, 60)
    found = evaluate(part.tree, positions(sizes) | own | numbers | {"s": scores[..., row:, key:]}, np.float64)
    assert np.array_equal(*np.broadcast_arrays(found, np.broadcast_to(expected, scores.shape)[..., row:, key:]))
    assert names.keys() == set(re.findall(r"\w+", text)) & NUMBERS.keys()


# -- transports and layouts ------------------------------------------------------------------------------------------------------


def test_messages_of_threads() -> None:
    """Several under way at once, waited for in another order, empty ones among them; arrays of any type."""

    def work(comm: Any) -> list[Any]:
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        sent = [np.full(3, comm.rank, np.int64), np.full((0, 2), 1.0), np.full((2, 2), comm.rank, np.float16)]
        came = [np.zeros_like(x) for x in sent]
        first = comm.exchange(sent, right, came, left)
        second_came = [np.zeros(1)]
        second = comm.exchange([np.array([10.0 + comm.rank])], left, second_came, right)
        second.wait()
        first.wait()
        assert comm.gather(bytes([comm.rank])) == [bytes([rank]) for rank in range(comm.size)]
        return [int(came[0][0]), float(came[2][1, 1]), float(second_came[0][0])]

    assert threads(4, work) == [[(r - 1) % 4, float((r - 1) % 4), 10.0 + (r + 1) % 4] for r in range(4)]
    assert threads(2, lambda comm: as_communicator(comm) is comm) == [True, True]
    with cupyflash.simulated_device("H100-SXM"):
        assert threads(2, lambda comm: cupyflash.launch.simulated.current_simulation().device.name) == ["H100-SXM"] * 2


@sweep(10, 50, length=st.integers(0, 300), ranks=st.integers(1, 9), layout=st.sampled_from(LAYOUTS), axis=st.integers(-2, 1))
def test_unshard_is_shards_inverse(length: int, ranks: int, layout: str, axis: int) -> None:
    x = np.arange(length * 3, dtype=np.int32).reshape((length, 3) if axis % 2 == 0 else (3, length))
    own = threads(ranks, lambda comm: (shard(x, comm, layout, axis), unshard(shard(x, comm, layout, axis), comm, layout, axis)))
    assert [part.shape[axis] for part, _ in own] == [sum(map(len, part)) for part in parts(length, ranks, layout)]
    assert all(np.array_equal(whole, x) for _, whole in own)
    with pytest.raises(ValueError, match="axis must be between -2 and 1"):
        threads(1, lambda comm: shard(x, comm, layout, 2))


def test_a_band_is_for_parts_only() -> None:
    """A window of a user's has no negative sides; that of a piece may, and must not be empty."""
    assert Options(window=Band(-3, 5)).window == (-3, 5) and Options(window=Band(None, 0)).causal
    with pytest.raises(ValueError, match="left \\+ right of at least 0"):
        Options(window=Band(-3, 2))
    with pytest.raises(ValueError, match="window must be"):
        Options(window=(-3, 5))


@sweep(15, 200, data=st.data())
def test_bands_are_counted(data: st.DataObject) -> None:
    """Closed forms and schedules agree where rows see nothing at either end, and the last one not the last key."""
    left, right = data.draw(st.tuples(*[st.none() | st.integers(-150, 150)] * 2))
    if left is not None and right is not None and left + right < 0:
        left, right = -right, -left
    lengths = {"padded": True, "key_lengths": (data.draw(st.integers(0, 50)),)} if data.draw(st.booleans()) else {}
    n_q, n_k = data.draw(st.integers(1, 200)), data.draw(st.integers(50, 200))
    problem = Problem(1, 2, 1, n_q, n_k, 16, "float16", window=Band(left, right), **lengths)
    for algorithm in ("fa1", "fa2", "standard"):
        for schedule in (plan(problem, A100, algorithm), plan_backward(problem, A100, algorithm)):
            assert theory.traffic(schedule) == replay(schedule) == replay(schedule, literal=True)
