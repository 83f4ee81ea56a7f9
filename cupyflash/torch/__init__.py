"""Attention of PyTorch tensors, with gradients: CUDA tensors on the GPU without a copy, CPU tensors on the simulated device.

    from cupyflash.torch import scaled_dot_product_attention

The calls of `cupyflash`, and those of PyTorch, flash-attn and FlexAttention by their own names, arguments and meanings. All of them
run through custom operations of `torch.library`, which `torch.compile` and `torch.export` take as they are. PyTorch is imported
here and nowhere else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cupyflash.torch.calls import attention as attention
from cupyflash.torch.calls import attention_decode as attention_decode
from cupyflash.torch.calls import attention_varlen as attention_varlen
from cupyflash.torch.flash_attn import flash_attn_func as flash_attn_func
from cupyflash.torch.flash_attn import flash_attn_varlen_func as flash_attn_varlen_func
from cupyflash.torch.flash_attn import flash_attn_with_kvcache as flash_attn_with_kvcache
from cupyflash.torch.sdpa import scaled_dot_product_attention as scaled_dot_product_attention

if TYPE_CHECKING:
    from cupyflash.torch.flex import flex_attention as flex_attention

__all__ = [
    "attention",
    "attention_decode",
    "attention_varlen",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "flex_attention",
    "scaled_dot_product_attention",
]


def __getattr__(name: str) -> object:
    if name == "flex_attention":  # PyTorch's module of that name imports its compiler: seconds
        from cupyflash.torch.flex import flex_attention

        return flex_attention
    raise AttributeError(f"module 'cupyflash.torch' has no attribute {name!r}")
