"""Tests and measures cupyflash on the GPU at hand in one call:  python benchmarks/on_gpu.py FOLDER

Runs tests/gpu, then benchmarks/forward.py and benchmarks/backward.py, and writes FOLDER/tests.txt, FOLDER/DEVICE-DATE.json and
FOLDER/DEVICE-DATE-backward.json. Nothing is installed; the repository's root goes on the path.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    command = [sys.executable, "-m", "pytest", "-q", "tests/gpu", "-p", "no:cacheprovider"]
    with (folder / "tests.txt").open("w") as log:
        tests = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
    print((folder / "tests.txt").read_text()[-2000:])
    failed = tests.returncode
    for name in ("forward.py", "backward.py"):  # whatever came before: a GPU may not be there again
        benchmark = [sys.executable, str(ROOT / "benchmarks" / name), "--out", str(folder.resolve())]
        failed = subprocess.run(benchmark, cwd=ROOT, env=environment).returncode or failed
    return failed


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1])))
