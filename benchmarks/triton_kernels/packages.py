"""Kernels of Liger-Kernel, flash-linear-attention and Unsloth, forward and backward, on the PTX machine beside PyTorch.

    pip install --no-deps liger-kernel flash-linear-attention fla-core einops unsloth
    python benchmarks/triton_kernels/packages.py [liger] [fla] [unsloth] [--device NAME] [--only KERNEL] [--write]
    python benchmarks/triton_kernels/packages.py --table

A line each: the largest difference of outputs and gradients from the reference's (PyTorch's on the CPU, and the packages' own of
recurrences), in float32 (chunks multiply in TF32, those of
delta rules in bfloat16), beside the largest element; launches; findings; seconds of processor time, compiling included. `--write`
puts the lines into `results.json`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from tutorial import place_of

from cupyflash.basics import Report
from cupyflash.sim.triton import simulated_triton

RESULTS = Path(__file__).parent / "results.json"

Function = Callable[..., Any]
Case = tuple[str, Function, Function, list[Any]]
"""A kernel's name, it and its reference as functions of tensors, and these tensors."""


def drawn(*shape: int) -> Any:
    import torch

    return torch.randn(*shape, device="cuda", requires_grad=True)


def decays(*shape: int) -> Any:
    """Returns logarithms of gates."""
    import torch

    return torch.nn.functional.logsigmoid(torch.randn(*shape, device="cuda")).requires_grad_()


def of(module: str, *names: str) -> Any:
    """Returns functions of a module: one, or a tuple of many."""
    loaded = importlib.import_module(module)
    found = tuple(getattr(loaded, name) for name in names)
    return found if len(found) > 1 else found[0]


def liger() -> list[Case]:
    """Eight kernels; an input that a kernel overwrites is a copy (x * 1)."""
    import torch
    import torch.nn.functional as F

    def apply(module: str, name: str) -> Function:
        function: Function = of(f"liger_kernel.ops.{module}", name).apply
        return function

    labels, target = torch.randint(0, 300, (8,)), torch.softmax(torch.randn(4, 64), -1)
    rms, layer = apply("rms_norm", "LigerRMSNormFunction"), apply("layer_norm", "LigerLayerNormFunction")
    group, silu = apply("group_norm", "LigerGroupNormFunction"), apply("swiglu", "LigerSiLUMulFunction")
    gelu, entropy = apply("geglu", "LigerGELUMulFunction"), apply("cross_entropy", "LigerCrossEntropyFunction")
    divergence, softmax = apply("kl_div", "LigerKLDivLossFunction"), apply("softmax", "LigerSoftmaxFunction")
    return [
        ("rms_norm", lambda x, w: rms(x * 1, w, 1e-6), lambda x, w: F.rms_norm(x, (96,), w, 1e-6), [drawn(6, 96), drawn(96)]),
        ("layer_norm", lambda x, w, b: layer(x, w, b, 1e-5), lambda x, w, b: F.layer_norm(x, (96,), w, b, 1e-5),
         [drawn(6, 96), drawn(96), drawn(96)]),
        ("group_norm", lambda x, w, b: group(x, w, b, 8, 2, 1e-5), lambda x, w, b: F.group_norm(x, 2, w, b, 1e-5),
         [drawn(2, 8, 40), drawn(8), drawn(8)]),
        ("swiglu", lambda a, b: silu(a * 1, b * 1), lambda a, b: F.silu(a) * b, [drawn(6, 100), drawn(6, 100)]),
        ("geglu", lambda a, b: gelu(a * 1, b * 1), lambda a, b: F.gelu(a, approximate="tanh") * b,
         [drawn(6, 100), drawn(6, 100)]),
        ("cross_entropy", lambda x: entropy(x * 1, labels, None)[0], lambda x: F.cross_entropy(x, labels), [drawn(8, 300)]),
        ("kl_div", lambda x: divergence(torch.log_softmax(x, -1), target, "batchmean", False),
         lambda x: F.kl_div(torch.log_softmax(x, -1), target, reduction="batchmean"), [drawn(4, 64)]),
        ("softmax", softmax, lambda x: torch.softmax(x, -1), [drawn(6, 200)]),
    ]  # fmt: skip


def fla() -> list[Case]:
    """Recurrences over 80 steps (chunks have 64), of 2 heads of 32, against the package's own in PyTorch; and its layers."""
    import torch
    import torch.nn.functional as F

    shape, ops = (1, 80, 2, 32), "fla.ops"
    labels = torch.randint(0, 300, (8,))
    gla, recurrent_gla = of(f"{ops}.gla", "chunk_gla", "fused_recurrent_gla")
    simple, retention = of(f"{ops}.simple_gla", "chunk_simple_gla"), of(f"{ops}.retention", "chunk_retention")
    delta, recurrent_delta = of(f"{ops}.delta_rule", "chunk_delta_rule", "fused_recurrent_delta_rule")
    gated, hgrn = of(f"{ops}.gated_delta_rule", "chunk_gated_delta_rule"), of(f"{ops}.hgrn", "fused_recurrent_hgrn")
    naive_gla, naive_simple = (
        of(f"{ops}.gla.naive", "naive_recurrent_gla"),
        of(f"{ops}.simple_gla.naive", "naive_parallel_simple_gla"),
    )
    naive_delta, naive_hgrn = (
        of(f"{ops}.delta_rule.naive", "delta_rule_recurrence"),
        of(f"{ops}.hgrn.naive", "naive_recurrent_hgrn"),
    )
    naive_gated = of(f"{ops}.gated_delta_rule.naive", "naive_recurrent_gated_delta_rule")
    naive_retention = of(f"{ops}.retention.naive", "naive_retention")
    gated_rms, gated_reference = of("fla.modules.norm.layernorm_gated", "rmsnorm_fn", "rms_norm_ref")
    rotary, rotary_reference = of("fla.modules.rotary.ops", "rotary_embedding", "rotary_embedding_ref")
    entropy = of("fla.modules.fused_cross_entropy.ops", "cross_entropy_loss")
    angles = torch.outer(torch.arange(80.0), 100 ** -torch.linspace(0, 1, 16))
    cos, sin = angles.cos(), angles.sin()

    def unit(x: Any) -> Any:
        return F.normalize(x, dim=-1)

    def halves(q: Any, k: Any, *more: Any) -> Any:
        """Makes the arguments that chunks of the delta rule take: bfloat16, keys of length 1."""
        return (one.bfloat16() for one in (q, unit(k), *more))

    def heads_first(naive: Function) -> Function:
        return lambda *tensors: naive(*(one.transpose(1, 2) for one in tensors)).transpose(1, 2)

    qkv = [drawn(*shape) for _ in range(3)]
    rates = torch.rand(*shape[:3], device="cuda").requires_grad_()
    gates = decays(*shape[:3])
    return [
        ("chunk_gla", lambda *t: gla(*t)[0], lambda *t: naive_gla(*t)[0], [*qkv, decays(*shape)]),
        ("fused_recurrent_gla", lambda *t: recurrent_gla(*t)[0], lambda *t: naive_gla(*t)[0], [*qkv, decays(*shape)]),
        ("chunk_simple_gla", lambda *t: simple(*t)[0], lambda *t: naive_simple(*t)[0], [*qkv, gates]),
        ("chunk_retention", lambda *t: retention(*t)[0], heads_first(naive_retention), qkv),
        ("chunk_delta_rule", lambda *t: delta(*halves(*t))[0],
         heads_first(lambda q, k, v, b: naive_delta(q, unit(k), v, b)[0]), [*qkv, rates]),
        ("fused_recurrent_delta_rule", lambda q, k, v, b: recurrent_delta(q, unit(k), v, b)[0],
         heads_first(lambda q, k, v, b: naive_delta(q, unit(k), v, b)[0]), [*qkv, rates]),
        ("chunk_gated_delta_rule", lambda q, k, v, g, b: gated(*halves(q, k, v, g, b))[0],
         lambda q, k, v, g, b: naive_gated(q, unit(k), v, b, g)[0], [*qkv, gates, rates]),
        ("fused_recurrent_hgrn", lambda *t: hgrn(*t)[0], lambda *t: naive_hgrn(*t)[0], [drawn(1, 80, 100), decays(1, 80, 100)]),
        ("rms_norm_gated", lambda x, w, z: gated_rms(x, w, None, z), lambda x, w, z: gated_reference(x, w, None, z),
         [drawn(6, 96), drawn(96), drawn(6, 96)]),
        ("rotary_embedding", lambda x: rotary(x, cos, sin), lambda x: rotary_reference(x, cos, sin), qkv[:1]),
        ("cross_entropy", lambda x: entropy(x, labels)[0], lambda x: F.cross_entropy(x, labels, reduction="none"), [drawn(8, 300)]),
    ]  # fmt: skip


def unsloth() -> list[Case]:
    """Kernels of `unsloth.kernels`, which need neither bitsandbytes nor transformers, as the package does."""
    import torch
    import torch.nn.functional as F

    folder = Path(next(iter(importlib.util.find_spec("unsloth").submodule_search_locations)))  # type: ignore[union-attr, arg-type]
    for name in ("unsloth", "unsloth.kernels"):
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
    sys.meta_path.append(Absent())
    rms, layer = of("unsloth.kernels.rms_layernorm", "fast_rms_layernorm"), of("unsloth.kernels.layernorm", "fast_layernorm")
    rope, entropy = (
        of("unsloth.kernels.rope_embedding", "fast_rope_embedding"),
        of("unsloth.kernels.cross_entropy_loss", "fast_cross_entropy_loss"),
    )
    swiglu = of("unsloth.kernels.swiglu", "swiglu_fg_kernel", "swiglu_DWf_DW_dfg_kernel")
    exact = of("unsloth.kernels.geglu", "geglu_exact_forward_kernel", "geglu_exact_backward_kernel")
    approximate = of("unsloth.kernels.geglu", "geglu_approx_forward_kernel", "geglu_approx_backward_kernel")
    labels = torch.randint(0, 300, (2, 4))
    angles = torch.outer(torch.arange(20.0), 100 ** -torch.linspace(0, 1, 16)).repeat(1, 2)

    def rotated(x: Any) -> Any:
        first, second = x.chunk(2, -1)
        return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()

    def norm(weight: Any, bias: Any = None) -> Any:
        return SimpleNamespace(weight=weight, bias=bias, eps=1e-5, elementwise_affine=True)

    def gate(kernels: tuple[Function, Function]) -> Function:
        """Makes one differentiable function of a forward and a backward kernel, which writes over its arguments."""

        class Gate(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, e: Any, g: Any) -> Any:
                ctx.save_for_backward(e, g)
                return kernels[0](e, g)

            @staticmethod
            def backward(ctx: Any, gradient: Any) -> Any:
                gradient, e, g = (one.clone().reshape(-1, one.shape[-1]) for one in (gradient, *ctx.saved_tensors))
                _, dg, de = kernels[1](gradient, e, g)
                return de.reshape(ctx.saved_tensors[0].shape), dg.reshape(ctx.saved_tensors[1].shape)

        return Gate.apply  # type: ignore[no-any-return]

    pair = [drawn(2, 3, 100), drawn(2, 3, 100)]
    return [
        ("rms_layernorm", lambda x, w: rms(norm(w), x), lambda x, w: F.rms_norm(x, (96,), w, 1e-5), [drawn(2, 3, 96), drawn(96)]),
        ("layernorm", lambda x, w, b: layer(norm(w, b), x), lambda x, w, b: F.layer_norm(x, (96,), w, b, 1e-5),
         [drawn(2, 3, 96), drawn(96), drawn(96)]),
        ("rope_embedding", lambda q, k: torch.cat(rope(q * 1, k * 1, angles.cos(), angles.sin()), 1),
         lambda q, k: torch.cat((rotated(q), rotated(k)), 1), [drawn(2, 4, 20, 32), drawn(2, 2, 20, 32)]),
        ("swiglu", gate(swiglu), lambda e, g: F.silu(e) * g, pair),
        ("geglu_exact", gate(exact), lambda e, g: F.gelu(e) * g, pair),
        ("geglu_approx", gate(approximate), lambda e, g: F.gelu(e, approximate="tanh") * g, pair),
        ("cross_entropy", lambda x: entropy(x * 1, labels), lambda x: F.cross_entropy(x.flatten(0, 1), labels.flatten()),
         [drawn(2, 4, 300)]),
    ]  # fmt: skip


class Absent(MetaPathFinder, Loader):
    """Stands for packages that Unsloth's kernels import and do not use."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Finds each module of these packages."""
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in ("unsloth_zoo", "transformers") else None

    def create_module(self, spec: ModuleSpec) -> Any:
        """Returns a module that has every name."""
        return MagicMock(Version=version, LlamaRMSNorm=object, torch_compile=lambda *_, **__: lambda function: function)

    def exec_module(self, module: Any) -> None:
        """Does nothing: the module has its names."""


def version(text: str) -> list[int]:
    """Returns a version as numbers."""
    return [int(part) for part in re.findall(r"\d+", text.partition("+")[0])]


PACKAGES: dict[str, Callable[[], list[Case]]] = {"liger": liger, "fla": fla, "unsloth": unsloth}


def difference(ours: Function, theirs: Function, tensors: list[Any]) -> tuple[float, float]:
    """Returns the largest difference of output and gradients, and the largest element of the reference's. Kernels may write to
    their gradient's memory, so each gets its own."""
    import torch

    out, reference = ours(*tensors), theirs(*tensors)
    gradient = torch.randn_like(out)
    pairs = [(out, reference)]
    found = torch.autograd.grad(out, tensors, gradient.clone())
    pairs += zip(found, torch.autograd.grad(reference, tensors, gradient.clone()), strict=True)
    with torch.no_grad():
        return max(float((a - b).abs().max()) for a, b in pairs), max(float(b.abs().max()) for _, b in pairs)


def run(package: str, device: str, only: str | None) -> dict[str, Report]:
    """Runs a package's kernels; returns the figures by kernel."""
    import torch

    figures = {}
    # Autotuners take their first configuration: benchmarks have no time.
    with simulated_triton(device, findings="keep", benchmark_seconds=0) as launches:
        torch.manual_seed(0)
        for name, ours, theirs, tensors in PACKAGES[package]():
            if only not in (None, name):
                continue
            began, before = time.process_time(), len(launches)
            largest, of_all = difference(ours, theirs, tensors)
            texts = Counter(place_of(one) for launch in launches[before:] for one in launch.findings)
            seconds, count = round(time.process_time() - began, 1), len(launches) - before
            figures[name] = {
                "difference": f"{largest:.1e} of {of_all:.2g}",
                "launches": count,
                "seconds": seconds,
                "findings": texts,
            }
            print(package, name, device, json.dumps(figures[name]), flush=True)
    return figures


def counted(findings: dict[str, int]) -> str:
    """Returns findings by their text, with the number of each."""
    return ", ".join(f"{number} x {text}" for text, number in findings.items()) or "none"


def table(results: Report) -> str:
    """Returns the table of docs/triton.md."""
    rows = ["| package | kernel | A100-40GB | H100-SXM | launches | seconds | findings |", "|---" * 7 + "|"]
    for package, devices in results.get("packages", {}).items():
        for name, first in devices["A100-40GB"].items():
            second = devices["H100-SXM"][name]
            found = "; ".join(dict.fromkeys(counted(one["findings"]) for one in (first, second)))
            both = [" ; ".join(dict.fromkeys(str(one[key]) for one in (first, second))) for key in ("launches", "seconds")]
            rows.append(
                f"| {package} | {name} | {first['difference']} | {second['difference']} | {both[0]} | {both[1]} | {found} |"
            )
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("packages", nargs="*", default=[*PACKAGES], metavar="PACKAGE")
    # A process has one device: packages ask for it when they are imported.
    parser.add_argument("--device", choices=("A100-40GB", "H100-SXM"), default="A100-40GB")
    parser.add_argument("--only", metavar="KERNEL")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--table", action="store_true")
    asked = parser.parse_args()
    results = json.loads(RESULTS.read_text())
    if asked.table:
        print(table(results), end="")
        return
    for package in asked.packages:
        figures = run(package, asked.device, asked.only)
        if asked.write:
            results.setdefault("packages", {}).setdefault(package, {}).setdefault(asked.device, {}).update(figures)
            RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
