"""The PTX machine's folders import in one direction, no module is in a circle, and no file has a name of another room."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

MACHINE = Path(__file__).resolve().parent.parent / "sim" / "ptx"

LAYERS = ("text", "state", "order", "memory", "decode", "execute", "")
"""Folders, the lowest first; "" are the files beside them. Each may import from itself and from those before it."""


def modules(root: Path) -> dict[str, Path]:
    """Files by dotted name below the root; a package has its folder's name, the root "" ."""
    names = {path.relative_to(root).with_suffix("").parts: path for path in sorted(root.rglob("*.py"))}
    return {".".join(parts[:-1] if parts[-1] == "__init__" else parts): path for parts, path in names.items()}


def imports(name: str, known: dict[str, Path]) -> set[str]:
    """The modules that one imports, in functions and for type checkers, too."""
    package = name.split(".") if known[name].name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(known[name].read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*filter(None, package)][: len([*filter(None, package)]) - node.level + 1]
            module = ".".join([*base, *([node.module] if node.module else [])])
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cupyflash.sim.ptx"):
            module = (node.module or "").removeprefix("cupyflash.sim.ptx").lstrip(".")
        elif isinstance(node, ast.Import) and any(one.name.startswith("cupyflash.sim.ptx") for one in node.names):
            raise AssertionError(f"{name}: write 'from ... import ...'")
        else:
            continue
        for one in node.names:
            inner = f"{module}.{one.name}".lstrip(".")
            found.add(inner if inner in known else module)
    assert found <= set(known), (name, found - set(known))
    return found - {name}


def circle(graph: dict[str, set[str]]) -> set[str]:
    """The modules that are left when all that import nothing that is left have gone: those in circles, and who imports them."""
    left = dict(graph)
    while free := {name for name, targets in left.items() if not targets & set(left)}:
        left = {name: targets for name, targets in left.items() if name not in free}
    return set(left)


def upward(graph: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Imports from a lower layer to a higher one."""

    def layer(name: str) -> int:
        folder = name.partition(".")[0]
        return LAYERS.index(folder if folder in LAYERS else "")

    return [(name, target) for name, targets in graph.items() for target in sorted(targets) if layer(target) > layer(name)]


def graph_of(root: Path) -> dict[str, set[str]]:
    known = modules(root)
    return {name: imports(name, known) for name in known}


def test_no_module_is_in_a_circle_and_layers_import_downwards() -> None:
    graph = graph_of(MACHINE)
    assert len(graph) > 50 and {name.partition(".")[0] for name in graph} >= set(LAYERS)
    assert circle(graph) == set()
    assert upward(graph) == []


@pytest.mark.parametrize(
    "statement",
    [
        "from ..execute.b import B",
        "def f():\n    from ..execute import b",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..execute.b import B",
        "from cupyflash.sim.ptx.execute import b",
    ],
)
def test_a_circle_is_seen_however_it_is_written(tmp_path: Path, statement: str) -> None:
    for folder in ("text", "execute"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "__init__.py").write_text("from .execute.b import B")
    (tmp_path / "text" / "a.py").write_text(statement)
    (tmp_path / "execute" / "b.py").write_text("from ..text.a import A")
    graph = graph_of(tmp_path)
    assert circle(graph) == {"", "text.a", "execute.b"} and upward(graph) == [("text.a", "execute.b")]


def test_a_file_of_the_machine_has_a_name_that_no_other_room_has() -> None:
    """Nor does another name differ from it by an s alone."""
    everywhere = [path.stem for folder in ("sim", "cupyflash") for path in (MACHINE.parent.parent / folder).rglob("[!_]*.py")]
    uses = Counter(name.removesuffix("s") for name in everywhere)
    assert [path.stem for path in MACHINE.rglob("[!_]*.py") if uses[path.stem.removesuffix("s")] > 1] == []


DOCS = (MACHINE.parent.parent / "docs" / "ptx.md").read_text()


def test_the_docs_follow_an_execution_through_every_file() -> None:
    section = DOCS[DOCS.index("## From PTX text to a finding") :]
    unnamed = {path.name for path in MACHINE.rglob("*.py") if not path.name.startswith("__") and path.name not in section}
    assert unnamed == set()
    named = {name for name in re.findall(r"`(\w+/[\w/]+\.py)`", section) if not (MACHINE / name).is_file()}
    assert named == set()
