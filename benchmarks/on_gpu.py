"""Tests and measures cupyflash on the GPU at hand in one call:  python benchmarks/on_gpu.py FOLDER

Runs tests/gpu, then benchmarks/forward.py, and writes FOLDER/tests.txt and FOLDER/DEVICE-DATE.json. Nothing is installed; the
repository's root goes on the path.
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
    benchmark = [sys.executable, str(ROOT / "benchmarks" / "forward.py"), "--out", str(folder.resolve())]
    measured = subprocess.run(benchmark, cwd=ROOT, env=environment)  # whatever the tests said: a GPU may not be there again
    return tests.returncode or measured.returncode


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1])))
