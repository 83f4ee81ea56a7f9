"""Cubins of a ladder's kernels, for predicted.py: made by nvcc from a copy of its sources that you fetched.

python benchmarks/published/build.py SOURCES FOLDER NAME ... [-I FOLDER] [--nvrtc FOLDER]

SOURCES/OWNER+NAME@COMMIT is a checkout of a ladder's repository, with the commit's first 8 digits (`git archive`). A temporary file
includes a step's file and names its kernels, so that templates are made. The options are the ladder's, and -lineinfo; the compiler
is the nvcc on the PATH, or an NVRTC of the version that the ladder's file names, whose wheels are in a folder (nvrtc.py).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from published import Ladder, Step, ladders, nvrtc

ALWAYS = ("-lineinfo", "--expt-relaxed-constexpr", "--expt-extended-lambda", "-w")


def cubin_of(folder: Path, ladder: Ladder, step: Step) -> Path:
    """The place of a step's cubin: FOLDER/NAME/COMMIT/FILE.cubin."""
    return folder / ladder.name / step.commit[:8] / f"{step.file}.cubin"


def source_of(sources: Path, ladder: Ladder, step: Step) -> Path:
    """The file of a step in the checkout of its commit."""
    return sources / f"{'+'.join(ladder.repository.split('/')[-2:])}@{step.commit[:8]}" / step.file


def build(source: Path, target: Path, ladder: Ladder, kernels: Sequence[str], includes: Sequence[Path], wheels: Path | None) -> str:
    """Compile the kernels of a file; returns the compiler's complaint, "" if it had none."""
    folders = dict.fromkeys([source.parent, *(source.parent / up for up in ("include", "../include", "..")), *includes])
    if wheels is not None:
        kept = [each for each in ladder.compiler.options if not each.startswith(("-O", "-lineinfo"))]
        kept = [each.replace("c++14", "c++17") for each in kept]  # what nvcc warns of there is an error of NVRTC's
        architecture = f"-arch={ladder.compiler.architecture}"
        return nvrtc.build(source, target, [*(f"-I{each}" for each in folders), architecture, "-lineinfo", *kept], kernels, wheels)
    text = source.read_text()
    spaces = "".join(f"using namespace {name};" for name in ("flash", "deep_gemm") if f"namespace {name} " in text)
    named = enumerate(sorted(set(kernels)))
    keeps = "\n".join(f"extern const void* const keep_{k}; const void* const keep_{k} = (const void*)&{name};" for k, name in named)
    own = ladder.compiler.options
    options = [*ALWAYS, *own, *(() if any(each.startswith("-std") for each in own) else ("-std=c++17",))]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "kept.cu"
        file.write_text(f'#include "{source.resolve()}"\n{spaces}\n{keeps}\n')
        words = ["nvcc", "-cubin", f"-arch={ladder.compiler.architecture}", *options, *(f"-I{each}" for each in folders)]
        done = subprocess.run([*words, "-o", str(target), str(file)], capture_output=True, text=True)
    return done.stderr if done.returncode else ""


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/published/build.py", description="Cubins of ladders' kernels.")
    parser.add_argument("sources", type=Path, metavar="SOURCES", help="the checkouts")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the cubins go")
    parser.add_argument("names", nargs="+", metavar="NAME", help="ladders")
    parser.add_argument("-I", dest="includes", action="append", type=Path, default=[], metavar="FOLDER", help="a folder of headers")
    parser.add_argument("--nvrtc", type=Path, metavar="FOLDER", help="the wheels of another NVRTC, in place of nvcc")
    asked = parser.parse_args(words)
    failed = 0
    for ladder in (each for each in ladders() if each.name in asked.names):
        kernels: dict[Path, tuple[Path, list[str]]] = {}
        for step in ladder.steps:
            place = kernels.setdefault(cubin_of(asked.folder, ladder, step), (source_of(asked.sources, ladder, step), []))
            place[1].extend(launch.kernel for launch in step.launches)
        for target, (source, names) in kernels.items():
            complaint = build(source, target, ladder, names, asked.includes, asked.nvrtc)
            failed += bool(complaint)
            print(f"  {ladder.name}: {source}: {complaint or 'built'}", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
