"""Names of kernels: what C++ made of them, and back (Itanium C++ ABI, "External Names (Mangling)")."""

from __future__ import annotations

import re
from collections.abc import Sequence

_SOURCE_NAME = re.compile(r"L?(\d+)")


def base_name(mangled: str) -> str:
    """The name that stands in the source, with its namespaces, without template arguments and parameters.

    `_ZN3cub6KernelIfEEvPT_` is `cub::Kernel`. A name that C++ did not mangle is itself. Unnamed namespaces are left out.
    """
    if not mangled.startswith("_Z"):
        return mangled
    nested = mangled.startswith("_ZN")
    at, parts = 3 if nested else 2, list[str]()
    while match := _SOURCE_NAME.match(mangled, at):
        at = match.end() + int(match[1])
        parts.append(mangled[match.end() : at])
        if not nested:
            break
    named = [part for part in parts if not part.startswith(("_GLOBAL__N_", "_INTERNAL_"))]
    return "::".join(named) or mangled


def variable_name(mangled: str) -> str:
    """The name of a variable that stands in the source; that of one in a function (`_ZZ1kvE4tile`) is `tile`."""
    if mangled.startswith("_ZZ"):
        for match in re.finditer(r"E(\d+)(?=[A-Za-z_])", mangled):
            name, rest = mangled[match.end() : match.end() + int(match[1])], mangled[match.end() + int(match[1]) :]
            if re.fullmatch(r"(_\d+)?", rest):
                return name
    return base_name(mangled)


def find_kernel(kernels: Sequence[str], name: str | None) -> str:
    """The kernel that is meant: by its name in the PTX, else by its name in the source where that is unique; None: the only one.

    Raises ValueError that lists the kernels.
    """
    listed = ", ".join(k if base_name(k) == k else f"{base_name(k)} ({k})" for k in kernels) or "none"
    if name is None:
        if len(kernels) == 1:
            return kernels[0]
        raise ValueError(f"say which kernel: this module has {listed}")
    if name in kernels:
        return name
    found = [k for k in kernels if name in (base_name(k), base_name(k).rpartition("::")[2])]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"kernel {name!r} is not unique: take one of {', '.join(found)}")
    raise ValueError(f"kernel {name!r} is not in this module; it has {listed}")


_COMMENTS = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_LAST_WORD = re.compile(r"([A-Za-z_]\w*)\s*(?:\[[^\]]*\]\s*)*$")


def parameter_names(cuda: str, kernel: str, count: int) -> list[str]:
    """The names of a kernel's parameters, of the last function of its name in CUDA C that has `count`; else arg0, arg1, ..."""
    text = _COMMENTS.sub(" ", cuda)
    for match in reversed(list(re.finditer(rf"\b{re.escape(kernel.rpartition('::')[2])}\s*\(", text))):
        parts = top_level(text, match.end())
        names = [found[1] for part in parts if (found := _LAST_WORD.search(part.partition("=")[0].strip()))]
        before = text[: match.start()].rstrip()[-1:]
        if len(set(names)) == len(parts) == count and (before.isalnum() or before in "_)>&*"):
            return names
    return [f"arg{n}" for n in range(count)]


def top_level(text: str, start: int) -> list[str]:
    """What stands between the commas from `start`, behind a parenthesis, to where it closes."""
    depth, parts, at = 0, [""], start
    while at < len(text) and depth >= 0:
        letter = text[at]
        depth += (letter in "([{<") - (letter in ")]}>")
        if letter == "," and depth == 0:
            parts.append("")
        elif depth >= 0:
            parts[-1] += letter
        at += 1
    return [] if parts == [""] else parts
