"""An expression in C: float32 throughout, a statement for each operation, an FMA for a sum or difference with a product.

The functions that the statements call are in kernels_cu/captured.cuh.
"""

from __future__ import annotations

from collections.abc import Mapping

from cupyflash.expressions.tree import OPERATIONS, Apply, Load, Name, Node, Number, counted

# An element of a captured array, in C, by its NumPy dtype.
ELEMENTS = {
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
    "float32": "float",
    "bool": "unsigned char",
    "int8": "signed char",
    "uint8": "unsigned char",
    "int16": "short",
    "int32": "int",
    "int64": "long long",
}
# Converts an element to its type in an expression; to_float is in element.cuh.
LOADED = {"bool": "{} != 0", "int": "int({})", "float": "to_float({})"}


class Statements:
    """Lines of C that compute trees, every subtree once; later trees reuse what earlier ones computed.

    Loads, for example, can be written where a row begins and the rest where each score is: take `lines` in between.

    names: the C names of s, the positions, captured numbers, and captured arrays (each a `Captured`), if trees use them. Positions
        must be those of a score: an index that is b, h, kv_h, row or k alone is not clamped. s is a float; positions are ints.
    prefix: the start of each temporary's name; a number follows.
    known: nodes that were computed elsewhere, and their names.
    """

    def __init__(self, names: Mapping[str, str], prefix: str = "score_", known: Mapping[Node, str] | None = None):
        self.names, self.prefix = names, prefix
        self.lines: list[str] = []
        self._known = dict(known or {})

    def value(self, node: Node) -> str:
        """The C name or literal that holds a node's value after the lines."""
        if isinstance(node, Number):
            return f"{node.value}f" if node.type == "float" else str(node.value)
        if isinstance(node, Name):
            return self.names[node.name]
        if node not in self._known:
            text = self._load(node) if isinstance(node, Load) else self._operation(node)
            name = f"{self.prefix}{len(self._known)}"
            self.lines.append(f"const {node.type} {name} = {text};")
            self._known[node] = name
        return self._known[node]

    def _load(self, node: Load) -> str:
        array = self.names[node.name]
        return LOADED[node.type].format(f"score_load({array}.at + {self.place(node, array)})")

    def place(self, node: Load, array: str) -> str:
        """The place of a load's element in `array`, an array of the same shape, in elements from its first one."""
        places = []
        for axis, index in enumerate(node.indices):
            place = self.value(index)
            if counted(index) is None:
                place = f"min(max({place}, 0), {array}.length[{axis}] - 1)"
            places.append(f"{array}.stride[{axis}] * {place}")
        return f"({' + '.join(places) or 0})"

    def _operation(self, node: Apply) -> str:
        operation, minus = OPERATIONS[node.operation], "-" if node.operation == "-" else ""
        match node:
            case Apply("float", "+" | "-", (Apply(_, "*", (left, right)), third)):
                a, b, c = map(self.value, (left, right, third))
                return f"fmaf({a}, {b}, {minus}{c})"
            case Apply("float", "+" | "-", (third, Apply(_, "*", (left, right)))):
                a, b, c = map(self.value, (left, right, third))
                return f"fmaf({minus}{a}, {b}, {c})"
        text = operation.c_int if operation.c_int and node.operands[-1].type == "int" else operation.c
        return text.format(*map(self.value, node.operands))
