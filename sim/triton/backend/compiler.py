"""A compiler for no target: Triton wants one of each backend, and the simulated device's is CUDA's own."""

from __future__ import annotations

from typing import Any

from triton.backends.compiler import BaseBackend, GPUTarget


class NoCompiler(BaseBackend):
    """Supports nothing."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return False

    def _nothing(self, *_: Any) -> Any:
        raise NotImplementedError

    hash = parse_options = add_stages = load_dialects = get_module_map = _nothing
