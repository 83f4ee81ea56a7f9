"""The custom operations as PyTorch's compiler has them: schemas, fake kernels, one graph without breaks, export."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="beside PyTorch, which is not installed")
pytestmark = pytest.mark.wide

from beside_torch import drawn, leaves  # noqa: E402

from cupyflash.torch import attention, flash_attn_with_kvcache, flex_attention, scaled_dot_product_attention  # noqa: E402

PLAIN = {"functions": "", "causal": True, "left": None, "right": None, "scale": None, "softcap": None}
DROPPED = {"dropout": 0.0, "deterministic": False}


def of_operations() -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments of each operation."""
    q, k, bias, sinks, packed = drawn((1, 18, 2, 16), (1, 32, 1, 16), (18, 32), (2,), (41, 2, 16))
    cu = torch.tensor([0, 18, 41])
    rows = leaves([q, k, k, bias, sinks])
    cached = (q[:, :1], k.clone(), k.clone(), torch.tensor([9]), k[:, :1], k[:, :1], None, sinks, None, None, [])
    return {
        "attention": ((*rows, None, None, None, None, []), {"algorithm": "auto", "layout": "bnhd", **DROPPED}),
        "attention_varlen": (
            (*leaves([packed] * 3), None, cu, cu, None, None, []),
            {"max_seqlen_q": 23, "max_seqlen_k": 23, **DROPPED},
        ),
        "attention_decode": (cached, {"num_splits": None, "layout": "bnhd"}),
    }


@pytest.mark.parametrize("name", ["attention", "attention_varlen", "attention_decode"])
def test_schemas_and_fake_kernels(name: str) -> None:
    tensors, plain = of_operations()[name]
    operation = getattr(torch.ops.cupyflash, name).default
    torch.library.opcheck(operation, tensors, PLAIN | plain, test_utils=("test_schema", "test_faketensor"))


def test_fake_gradients_have_the_shapes_and_strides_of_real_ones() -> None:
    """Gradients of the bias and the sinks, too."""
    tensors, plain = of_operations()["attention"]
    plain = PLAIN | plain
    given = [each.detach() if isinstance(each, torch.Tensor) else each for each in tensors]
    out, lse = torch.ops.cupyflash.attention(*given, **plain)
    arguments = (torch.ones_like(out), *given[:3], out, lse, *given[3:])
    operation = torch.ops.cupyflash.attention_backward.default
    torch.library.opcheck(
        operation, arguments, plain | {"dbias": True, "learned": []}, test_utils=("test_schema", "test_faketensor")
    )


def test_a_compiled_function_is_one_graph_with_the_same_numbers() -> None:
    """Dropout's seed is drawn in each call of the compiled program."""

    def function(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return scaled_dot_product_attention(2 * q, k, v, attn_mask=bias, dropout_p=0.3).sin()

    tensors = leaves(drawn((2, 18, 16), (2, 23, 16), (2, 23, 16), (18, 23)))
    compiled, made = torch.compile(function, fullgraph=True, backend="aot_eager"), []
    for each in (function, compiled):
        torch.manual_seed(1)
        out = each(*tensors)
        made += [(out, *torch.autograd.grad(out.sum(), tensors))]
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(*made, strict=True))
    assert not torch.equal(compiled(*tensors), made[1][0])


def test_a_compiled_decoding_writes_its_cache() -> None:
    q, cache, new = drawn((1, 1, 2, 16), (1, 32, 1, 16), (1, 1, 1, 16))
    caches = [cache.clone() for _ in range(4)]

    def function(k_cache: Any, v_cache: Any) -> Any:
        return 2 * flash_attn_with_kvcache(q, k_cache, v_cache, new, new, cache_seqlens=9)

    found = torch.compile(function, fullgraph=True, backend="aot_eager")(*caches[:2])
    assert (
        torch.equal(found, function(*caches[2:])) and torch.equal(caches[0], caches[2]) and torch.equal(caches[0][:, 9], new[:, 0])
    )


def test_an_export_is_the_operation() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Any, k: Any) -> Any:
            return scaled_dot_product_attention(q, k, k, is_causal=True)

    q, k = drawn((2, 18, 16), (2, 18, 16))
    program = torch.export.export(Model(), (q, k))
    assert any(node.target is torch.ops.cupyflash.attention.default for node in program.graph.nodes)
    assert torch.equal(program.module()(q, k), scaled_dot_product_attention(q, k, k, is_causal=True))


def test_functions_break_the_graph_where_they_are_traced() -> None:
    """And nowhere else: the operation is in the next graph, and what a score has captured learns."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention", reason="this PyTorch has no flex_attention")
    q, table = drawn((1, 2, 16, 16), (2, 16))
    block_mask = flex.create_block_mask(causal, None, None, 16, 16, device="cpu")

    def ours(q: Any, table: Any) -> Any:
        return 2 * attention(q, q, q, causal=True, score=lambda s, h, q, k: s + table[h, q - k])

    def theirs(q: Any, table: Any) -> Any:
        return 2 * flex_attention(q, q, q, lambda s, b, h, q, k: s + table[h, q - k], block_mask)

    for function in (ours, theirs):
        found = torch._dynamo.explain(function)(q, table)
        targets = [str(node.target) for graph in found.graphs for node in graph.graph.nodes]
        assert found.graph_break_count == 1 and targets.count("cupyflash.attention") == 1, (function.__name__, targets)
    (leaf,) = leaves([table])
    gradient, right = (
        torch.autograd.grad(each(q, leaf).square().sum(), leaf)[0] for each in (torch.compile(ours, backend="aot_eager"), ours)
    )
    assert torch.allclose(gradient, right, atol=1e-5) and right.any()


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k
