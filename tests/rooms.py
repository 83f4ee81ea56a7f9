"""The tests of each part of the project: `pytest --room machine` runs those that a change there may break first."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

ROOMS: dict[str, tuple[str, ...]] = {
    # kernels_cu/ and cupyflash/schedules/, forward; then backward
    "forward": (
        *("execution", "sparse", "varlen", "option_*", "softmax", "magnitudes", "mutants", "mutants_fa2", "fa3", "mutants_fa3"),
        *("decode", "mutants_decode", "mutants_score", "drawn_mutants", "masks", "masks_sequences", "wide_heads"),
    ),
    "backward": (
        "backward",
        "backward_algorithms",
        "backward_sparse",
        "fa3_backward",
        "mutants_fa3_backward",
        "mutants_backward",
        "mutants_queries",
        "wide_gradients",
    ),
    # sim/ptx/
    "machine": (
        *("cupy_kernels", "cute", "numba"),
        *("ptx_*", "profile*", "timeline*", "rawkernel", "triton*", "mutants_pipeline", "clock*", "program*", "standard_headers"),
    ),
    # sim/theory/, sim/two_level/machine.py and what a schedule says
    "theory": ("balance", "counts", "schedule", "moves", "theorem2", "theorem5", "sweep", "l2*", "times"),
    # sim/cli/
    "commands": (
        "host_memory",
        "judged",
        *("cli*", "judging*", "decode_commands", "demo", "explain", "fa3_commands", "flags", "formats", "paper", "resources"),
        *("trace*", "learn*", "verify", "pictures"),
    ),
    # what a user calls: cupyflash/
    "calls": (
        "recent",
        *("attention", "captured", "cubins", "decode_refusals", "device", "foreign_arrays", "gradients", "jax"),
        *("launcher", "layout", "merge", "prepared", "problem", "options", "keywords", "refusals", "dropout", "named_scores"),
        *("score*", "stand_in", "tensor_maps"),
        *("torch", "torch_[!e]*", "first_use", "second_order", "injected_faults", "warmup_decode"),
    ),
    # cupyflash/distributed/, and what counts it
    "ranks": ("ring*", "mpi", "interrupts", "benchmark_ring"),
    # all else: packaging, documents, benchmarks, examples
    "project": (
        *(
            "package",
            "readme",
            "pages",
            "snippets",
            "decoding_page",
            "masks_page",
            "benchmarks",
            "benchmark_decode",
            "benchmark_programs",
            "benchmark_rates",
            "timing*",
        ),
        *("accuracy", "published", "on_gpu", "example", "generate", "suites", "draws", "torch_example", "flex_attention"),
    ),
}


def left_out(path: Path, chosen: Sequence[str] | None) -> bool:
    """True if a test file of this folder is in none of the chosen rooms; if none is chosen, all files are in."""
    ours = path.suffix == ".py" and path.parent == Path(__file__).parent
    return bool(chosen) and ours and not set(chosen or ()) & set(rooms_of(path.name))


def rooms_of(file: str) -> list[str]:
    """The rooms that a test file's name, test_NAME.py, belongs to."""
    name = file.removeprefix("test_").removesuffix(".py")
    return [room for room, names in ROOMS.items() if any(fnmatch(name, pattern) for pattern in names)]
