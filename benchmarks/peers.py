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
