"""Other implementations of attention, on the same memory and stream: PyTorch's backends, and flash_attn on top of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

Call = Callable[[], Any]
BACKENDS = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")
# Elements of S up to which PyTorch's own products are timed too, which hold several matrices of that size.
MATH_SCORES = 1 << 30


@dataclass(frozen=True)
class Torch:
    """PyTorch and tensors (b, h, n, d), to be used on the stream that is its current one."""

    torch: Any
    tensors: Sequence[Any]

    def functions(self, math: bool) -> Iterator[tuple[str, Callable[..., Any], Sequence[Any]]]:
        """By name: a function of (q, k, v, causal), and the tensors to call it with."""
        from torch.nn.attention import SDPBackend

        for name in (*BACKENDS, "MATH") if math else BACKENDS:
            if hasattr(SDPBackend, name):
                yield f"torch {name.lower().removesuffix('_attention')}", self._by(getattr(SDPBackend, name)), self.tensors
        try:
            from flash_attn import flash_attn_func
        except ImportError:
            return

        def attention(q: Any, k: Any, v: Any, causal: bool) -> Any:
            return flash_attn_func(*(tensor.transpose(1, 2) for tensor in (q, k, v)), causal=causal).transpose(1, 2)

        # With (b, n, h, d) in memory, which it reads without copies.
        yield "flash_attn", attention, [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in self.tensors]

    def _by(self, backend: Any) -> Callable[..., Any]:
        """scaled_dot_product_attention by one backend; RuntimeError where it does not take such tensors."""
        from torch.nn.attention import sdpa_kernel

        def attention(q: Any, k: Any, v: Any, causal: bool) -> Any:
            with sdpa_kernel(backend):
                return self.torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

        return attention

    def forward(self, causal: bool, scores: int) -> Iterator[tuple[str, Call]]:
        """O of the tensors Q, K and V, with S of so many elements."""
        for name, function, tensors in self.functions(math=scores <= MATH_SCORES):
            yield name, self._without_graph(function, tensors, causal)

    def _without_graph(self, function: Callable[..., Any], tensors: Sequence[Any], causal: bool) -> Call:
        def call() -> Any:
            with self.torch.no_grad():
                return function(*tensors, causal)

        return call

    def backward(self, causal: bool) -> Iterator[tuple[str, Call]]:
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

    def calls(self) -> Iterator[tuple[str, Call]]:
        """O (b, h, 1, d), by name."""
        for name, call in (*self._sdpa(), *self._flash_attn(), *self._flashinfer()):
            yield name, self._without_graph(call)

    def _without_graph(self, function: Call) -> Call:
        def call() -> Any:
            with self.torch.no_grad():
                return function()

        return call

    def _sdpa(self) -> Iterator[tuple[str, Call]]:
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

    def _flash_attn(self) -> Iterator[tuple[str, Call]]:
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

    def _flashinfer(self) -> Iterator[tuple[str, Call]]:
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
