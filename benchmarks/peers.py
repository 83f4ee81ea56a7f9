"""Other implementations of attention, on the same memory and stream, on top of PyTorch: its scaled_dot_product_attention by each
backend, its flex_attention compiled, a fused kernel in Triton (fused_triton.py), flash_attn (2, 3 and 4) and FlashInfer."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from records import told

Call = Callable[[], Any]
Calls = Iterator[tuple[str, Call]]
"""Calls, each with its implementation's name."""
BACKENDS = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")
# Elements of S up to which PyTorch's own products are timed too, which hold several matrices of that size.
MATH_SCORES = 1 << 30
# By name, where a function of (b, n, h, d) is: FlashAttention-2, FlashAttention-3 (its folder hopper/) and FlashAttention-4.
FLASH_ATTENTIONS = {
    "flash_attn": ("flash_attn", "flash_attn_func"),
    "flash_attn 3": ("flash_attn_interface", "flash_attn_func"),
    "flash_attn 4": ("flash_attn.cute", "flash_attn_func"),
}
MODULES = ("torch", "triton", *(module for module, _ in FLASH_ATTENTIONS.values()), "flashinfer")


@cache
def missing(module: str) -> str | None:
    """The reason why a peer's module cannot be imported, None if it can."""
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken one raises whatever it likes
        return told(error)
    return None


def all_missing() -> dict[str, str]:
    """The peers' modules that are not there, each with the reason."""
    return {module: reason for module in MODULES if (reason := missing(module))}


def without_graph(torch: Any, function: Call) -> Call:
    """A call from which PyTorch keeps nothing for gradients."""

    def call() -> Any:
        with torch.no_grad():
            return function()

    return call


def heads_second(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adapt a function of (b, n, h, d) to (b, h, n, d); if it returns L as well, O comes first."""

    def attention(q: Any, k: Any, v: Any, causal: bool) -> Any:
        out = function(*(tensor.transpose(1, 2) for tensor in (q, k, v)), causal=causal)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return attention


@cache
def _flex_of(n: int, device: str, causal: bool) -> tuple[Callable[..., Any], Any]:
    """flex_attention compiled, and its mask of N x N scores."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    seen = create_block_mask(lambda b, h, q, k: q >= k, None, None, n, n, device=device) if causal else None
    torch._dynamo.config.recompile_limit = 64  # a case each; beyond it flex_attention runs uncompiled
    return torch.compile(flex_attention, dynamic=False), seen


@cache
def _planned_flashinfer(shape: tuple[int, int, int, int], dtype: Any, device: str, causal: bool) -> Any:
    """FlashInfer's wrapper, planned for sequences of one length (b, n, h, d)."""
    import torch
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

    batch, n, heads, d = shape
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(torch.zeros(128 << 20, dtype=torch.uint8, device=device), "NHD")
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * n
    wrapper.plan(starts, starts, heads, heads, d, causal=causal, q_data_type=dtype, kv_data_type=dtype)
    return wrapper


@dataclass(frozen=True)
class Torch:
    """PyTorch and tensors (b, h, n, d), to be used on the stream that is its current one."""

    torch: Any
    tensors: Sequence[Any]

    def functions(self, math: bool) -> Iterator[tuple[str, Callable[..., Any], Sequence[Any]]]:
        """The implementations: name, a function of (q, k, v, causal) that has gradients, and the tensors to call it with."""
        from torch.nn.attention import SDPBackend

        for name in (*BACKENDS, "MATH") if math else BACKENDS:
            if hasattr(SDPBackend, name):
                yield f"torch {name.lower().removesuffix('_attention')}", self._by(getattr(SDPBackend, name)), self.tensors
        yield "torch flex", self._flex, self.tensors
        there = {name: place for name, place in FLASH_ATTENTIONS.items() if not missing(place[0])}
        if there:  # with (b, n, h, d) in memory, which these read without copies
            own = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in self.tensors]
            for name, (module, function) in there.items():
                yield name, heads_second(getattr(importlib.import_module(module), function)), own

    def forward_only(self) -> Iterator[tuple[str, Callable[..., Any], Sequence[Any]]]:
        """The implementations that have no gradients."""
        if not missing("triton"):
            import fused_triton

            yield "triton", fused_triton.attention, self.tensors
        if not missing("flashinfer"):
            yield "flashinfer", self._flashinfer, [tensor.transpose(1, 2).contiguous() for tensor in self.tensors]

    def _flex(self, q: Any, k: Any, v: Any, causal: bool) -> Any:
        """flex_attention, compiled once a shape, which its first call waits for."""
        compiled, mask = _flex_of(q.shape[-2], str(q.device), causal)
        return compiled(q, k, v, block_mask=mask)

    def _flashinfer(self, q: Any, k: Any, v: Any, causal: bool) -> Any:
        """FlashInfer's prefill of ragged sequences, planned once, which is not timed; it takes and returns (b, n, h, d)."""
        wrapper = _planned_flashinfer(tuple(q.shape), q.dtype, str(q.device), causal)
        out = wrapper.run(*(tensor.flatten(0, 1) for tensor in (q, k, v)))
        return out.unflatten(0, q.shape[:2]).transpose(1, 2)

    def _by(self, backend: Any) -> Callable[..., Any]:
        """scaled_dot_product_attention by one backend; RuntimeError where it does not take such tensors."""
        from torch.nn.attention import sdpa_kernel

        def attention(q: Any, k: Any, v: Any, causal: bool) -> Any:
            with sdpa_kernel(backend):
                return self.torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

        return attention

    def forward(self, causal: bool, scores: int) -> Calls:
        """O of the tensors Q, K and V, with S of so many elements."""
        for name, function, tensors in (*self.functions(math=scores <= MATH_SCORES), *self.forward_only()):
            yield name, without_graph(self.torch, partial(function, *tensors, causal))

    def backward(self, causal: bool) -> Calls:
        """dQ, dK and dV of the tensors Q, K, V and dO; the forward is run at the first call, and not again.

        Without PyTorch's own products, whose graph holds matrices of N x N.
        """
        for name, function, tensors in self.functions(math=False):
            yield name, self._differentiated(function, tensors, causal)

    def _differentiated(self, function: Callable[..., Any], tensors: Sequence[Any], causal: bool) -> Call:
        *inputs, gradient = (tensor.detach() for tensor in tensors)

        @cache
        def out() -> Any:
            for tensor in inputs:
                tensor.requires_grad_()
            return function(*inputs, causal)

        return lambda: self.torch.autograd.grad(out(), inputs, gradient, retain_graph=True)


@dataclass(frozen=True)
class Pages:
    """K and V of sequences in pages (pages, h_kv, page size, d), and `table` (b, pages of a sequence), int32."""

    k: Any
    v: Any
    table: Any

    @property
    def size(self) -> int:
        return int(self.k.shape[2])


@dataclass(frozen=True)
class TorchDecoding:
    """PyTorch and tensors of one query a sequence, q (b, h, 1, d), against k and v (b, h_kv, n, d), also in pages; `lengths` (b,),
    int32, are n each. On the stream that is PyTorch's current one."""

    torch: Any
    q: Any
    k: Any
    v: Any
    lengths: Any
    pages: Sequence[Pages]

    def calls(self) -> Calls:
        """O (b, h, 1, d), by name."""
        for name, call in (*self._sdpa(), *self._flash_attn(), *self._flashinfer()):
            yield name, without_graph(self.torch, call)

    def _sdpa(self) -> Calls:
        """Each backend with PyTorch's own grouped heads, and with the heads of a group as queries of one head: the same numbers,
        since the one query sees all keys."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        rows = self.q.reshape(self.q.shape[0], self.k.shape[1], -1, self.q.shape[-1])
        attention = self.torch.nn.functional.scaled_dot_product_attention

        def by(backend: Any, packed: bool) -> Call:
            def call() -> Any:
                with sdpa_kernel(backend):
                    if packed:
                        return attention(rows, self.k, self.v).reshape(self.q.shape)
                    return attention(self.q, self.k, self.v, enable_gqa=self.q.shape[1] != self.k.shape[1])

            return call

        for name in (*BACKENDS, "MATH"):
            if backend := getattr(SDPBackend, name, None):
                short = name.lower().removesuffix("_attention")
                yield f"torch {short}", by(backend, False)
                if rows.shape[2] > 1:
                    yield f"torch {short}, packed", by(backend, True)

    def _flash_attn(self) -> Calls:
        try:
            from flash_attn import flash_attn_with_kvcache
        except ImportError:
            return
        q = self.q.transpose(1, 2)

        def against(k: Any, v: Any, **more: Any) -> Call:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
            return lambda: flash_attn_with_kvcache(q, k, v, cache_seqlens=self.lengths, causal=True, **more).transpose(1, 2)

        yield "flash_attn", against(self.k, self.v)
        for pages in self.pages:
            if pages.size % 256 == 0:  # what it takes
                yield f"flash_attn, pages of {pages.size}", against(pages.k, pages.v, block_table=pages.table)

    def _flashinfer(self) -> Calls:
        """Planned once, which is not timed."""
        try:
            from flashinfer import BatchDecodeWithPagedKVCacheWrapper
        except ImportError:
            return
        torch, (batch, heads, _, d), kv_heads = self.torch, self.q.shape, self.k.shape[1]
        for pages in self.pages:
            each = pages.table.shape[1]
            workspace = torch.zeros(128 << 20, dtype=torch.uint8, device=self.q.device)
            wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=heads > kv_heads)
            starts = torch.arange(batch + 1, dtype=torch.int32, device=self.q.device) * each
            last = torch.full((batch,), pages.size, dtype=torch.int32, device=self.q.device)
            indices, dtype = pages.table.reshape(-1), self.q.dtype
            wrapper.plan(starts, indices, last, heads, kv_heads, d, pages.size, q_data_type=dtype, kv_data_type=dtype)

            def call(wrapper: Any = wrapper, pages: Pages = pages) -> Any:
                return wrapper.run(self.q[:, :, 0], (pages.k, pages.v))[:, :, None]

            yield f"flashinfer, pages of {pages.size}", call
