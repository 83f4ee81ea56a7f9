"""An expression in C: float32 throughout, a statement for each operation, an FMA for a sum or difference with a product."""

from __future__ import annotations

from collections.abc import Mapping

from cupyflash.expressions.tree import OPERATIONS, Apply, Load, Name, Node, Number, counted

# What the statements call, and the type by which a kernel is given a captured array; strides are in elements.
FUNCTIONS = """
template <typename T, int AXES> struct Captured {
  const T* at;
  long long stride[AXES > 0 ? AXES : 1];
  int length[AXES > 0 ? AXES : 1];
};

// Python's %: of the divisor's sign. An int modulo 0 is 0.
__device__ __forceinline__ float score_mod(float a, float b) {
  const float r = fmodf(a, b);
  return r != 0.0f && (r < 0.0f) != (b < 0.0f) ? __fadd_rn(r, b) : r;
}
__device__ __forceinline__ int score_mod(int a, int b) {
  const int r = b == 0 || b == -1 ? 0 : a % b;
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
"""
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
# From an element to the type that it has in an expression; to_float is element.cuh's.
LOADED = {"bool": "{} != 0", "int": "int({})", "float": "to_float({})"}


class Statements:
    """Lines of C that compute trees, every subtree once; what was computed before is known to whatever comes later.

    So loads, say, can be written out where a row begins, and the rest where each score is: take `lines` between.

    names: in C, s, the positions, captured numbers, and captured arrays (each a `Captured`), where trees have them. Positions must
        be those of a score: an index that is b, h, kv_h, row or k alone is not clamped. float s; ints otherwise.
    prefix: that of the temporaries' names, which a number follows. Names of the user's never come into C.
    """

    def __init__(self, names: Mapping[str, str], prefix: str = "score_"):
        self.names, self.prefix = names, prefix
        self.lines: list[str] = []
        self._known: dict[Node, str] = {}

    def value(self, node: Node) -> str:
        """The C name, or the literal, that has a node's value behind the lines."""
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
        places = []
        for axis, index in enumerate(node.indices):
            place = self.value(index)
            if counted(index) is None:
                place = f"min(max({place}, 0), {array}.length[{axis}] - 1)"
            places.append(f"{array}.stride[{axis}] * {place}")
        return LOADED[node.type].format(f"{array}.at[{' + '.join(places) or 0}]")

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
