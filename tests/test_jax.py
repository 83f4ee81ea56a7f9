"""cupyflash.jax beside JAX's own attention on the CPU, where JAX is installed."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from snippets import pages

jax = pytest.importorskip("jax", reason="beside JAX, which is not installed")
pytestmark = pytest.mark.wide

import cupyflash  # noqa: E402
from cupyflash.jax import attention, dot_product_attention  # noqa: E402

RNG = np.random.default_rng(0)


def normal(*shape: int) -> Any:
    return jax.numpy.asarray(RNG.standard_normal(shape).astype(np.float32))


MASK = RNG.random((2, 1, 18, 23)) > 0.3
CASES: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "causal, more keys": ((18, 23), {"is_causal": True, "scale": 0.3}),
    "causal": ((18, 18), {"is_causal": True, "local_window_size": (5, 5)}),
    "mask, lengths": ((18, 23), {"mask": MASK, "key_value_seq_lengths": np.array([23, 9])}),
}


@pytest.mark.parametrize("name", CASES)
def test_it_computes_jax_s(name: str) -> None:
    """With the gradients of q, k, v and a bias, in a compiled program."""
    (n_q, n_k), asked = CASES[name]
    arrays = normal(2, n_q, 4, 16), normal(2, n_k, 2, 16), normal(2, n_k, 2, 16), normal(1, 4, n_q, n_k)
    dout, found = normal(2, n_q, 4, 16), []
    for function in (dot_product_attention, jax.nn.dot_product_attention):

        def loss(q: Any, k: Any, v: Any, bias: Any, function: Any = function) -> Any:
            out = function(q, k, v, bias, **asked)
            return (out * dout).sum(), out

        (_, out), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(*arrays)
        found += [(out, *gradients)]
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_our_words_and_log_sum_exps() -> None:
    q, sinks = normal(2, 18, 16), normal(2)
    score = cupyflash.Score("s + slope[h] * (k - q)", slope=np.float32([0.5, 0.25]))
    out, lse = attention(q, q, q, sinks=sinks, score=score, causal=True, return_lse=True)
    expected = cupyflash.attention(*3 * [np.asarray(q)], sinks=np.asarray(sinks), score=score, causal=True, return_lse=True)
    assert np.array_equal(out, expected[0]) and np.array_equal(lse, expected[1])
    assert jax.grad(lambda x: attention(q, q, q, sinks=x).sum())(sinks).shape == (2,)
    rows = dot_product_attention(*3 * [q[:, :, None]], return_residual=True)[1]
    assert rows.shape == (2, 18, 1)


def test_what_is_refused() -> None:
    q = normal(18, 2, 16)
    for call, message in (
        (lambda: dot_product_attention(q, q, q, query_seq_lengths=[3]), "query_seq_lengths must be None"),
        (
            lambda: dot_product_attention(q, q[:9], q[:9], local_window_size=3),
            "local_window_size must be None for 18 queries and 9 keys",
        ),
        (lambda: attention(q, q, q, is_causal=True), "attention() got an unexpected keyword argument 'is_causal'"),
    ):
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            call()


def test_the_page_s_block() -> None:
    (block,) = [each for each in pages()["docs/coming_from.md"] if each.marks.get("run by") == "tests/test_jax.py"]
    names: dict[str, Any] = {}
    exec(block.text, names)
    expected = jax.grad(lambda q: jax.nn.dot_product_attention(q, q, q, is_causal=True).sum())(names["q"])
    np.testing.assert_allclose(names["gradient"], expected, rtol=1e-4, atol=1e-5)
