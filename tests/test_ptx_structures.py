"""Parameters that are structures: layouts, names, and that pointers in them are checked as parameters of their own are."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from test_ptx_gallery import gallery
from test_ptx_gallery_tensor import gallery as tensor_gallery
from test_ptx_harness import compile_cuda, kernel

from cupyflash.sim.ptx import Access, Launch, Module
from cupyflash.sim.ptx.decode.provenance import reached
from cupyflash.sim.ptx.state.segments import PointerField, meets
from suites import sample, sweep

SEEDS = sample([None, 0, 1, 2], [None, 0])


@cache
def compiled(source: str) -> Module:
    return Module.from_source(source)


# -- layouts --------------------------------------------------------------------------------------------------------------

NUMBERS = {"signed char": "i1", "short": "i2", "int": "i4", "long long": "i8", "float": "f4", "double": "f8", "bool": "?"}
LEAVES = st.sampled_from(["const float *", "float *", *NUMBERS])
LAYOUTS = st.lists(
    st.recursive(
        LEAVES,
        lambda inner: st.lists(inner, min_size=1, max_size=4) | st.tuples(LEAVES, st.integers(1, 3)),
        max_leaves=8,
    ),
    min_size=1,
    max_size=8,
)


class Layout:
    """A structure drawn by hypothesis: its C, its values in two forms, and all its leaves with the C that names each."""

    def __init__(self, fields: list[Any], rng: np.random.Generator):
        self.rng = rng
        self.leaves: list[tuple[str, str, Any]] = []  # expression, type, value
        self.c, self.mapping, values, dtype = self.structure(fields, "p")
        self.scalar = np.array(values, dtype)

    def leaf(self, kind: str, path: str) -> tuple[Any, Any]:
        """A value, and its NumPy type."""
        value: Any
        if "*" in kind:
            value, dtype = self.rng.integers(0, 9, 64).astype(np.float32), np.dtype(object)
        else:
            dtype = np.dtype(NUMBERS[kind])
            value = dtype.type(self.rng.integers(0, 2) if kind == "bool" else self.rng.integers(-9, 9))
        self.leaves.append((path, kind, value))
        return value, dtype

    def structure(self, fields: list[Any], path: str) -> tuple[str, dict[str, Any], tuple[Any, ...], np.dtype[Any]]:
        c: list[str] = []
        mapping: dict[str, Any] = {}
        types: list[Any] = []
        values: list[Any] = []
        for k, field in enumerate(fields):
            name = f"f{len(self.leaves)}_{k}"
            inner = f"{path}.{name}"
            if isinstance(field, list):
                text, mapping[name], value, dtype = self.structure(field, inner)
                c.append(f"struct {{ {text} }} {name};")
                types.append((name, dtype))
            elif isinstance(field, tuple):
                kind, count = field
                both = [self.leaf(kind, f"{inner}[{n}]") for n in range(count)]
                mapping[name] = [one for one, _ in both]
                value = np.empty(count, both[0][1])
                for n, (one, _) in enumerate(both):
                    value[n] = one
                c.append(f"{kind} {name}[{count}];")
                types.append((name, both[0][1], (count,)))
            else:
                value, dtype = self.leaf(field, inner)
                mapping[name] = value
                c.append(f"{field} {name};")
                types.append((name, dtype))
            values.append(value)
        return " ".join(c), mapping, tuple(values), np.dtype(types, align=True)

    def body(self, names: list[str]) -> str:
        """Each output gets a number of its own and the sum of all numbers and inputs; `names` are the leaves in C."""
        pairs = list(zip(names, (kind for _, kind, _ in self.leaves), strict=True))
        terms = [f"(double){name}" if "*" not in kind else f"{name}[t]" for name, kind in pairs if not kind.startswith("float *")]
        stores = [f"{name}[t] = s + {k};" for k, (name, kind) in enumerate(pairs) if kind == "float *"]
        return f"int t = threadIdx.x; double s = {' + '.join(['0', *terms])}; out[t] = s; {' '.join(stores)}"


@sweep(4, 16, layout=LAYOUTS, constant=st.booleans(), structured=st.booleans())
def test_a_structure_is_what_its_fields_are_as_parameters(layout: list[Any], constant: bool, structured: bool) -> None:
    ours = Layout(layout, np.random.default_rng(7))
    head = "const __grid_constant__ P p" if constant else "P p"
    source = f'struct P {{ {ours.c} }};\nextern "C" __global__ void k({head}, double *out) {{ {{}} }}'
    one = compiled(source.replace("{}", ours.body([path for path, _, _ in ours.leaves])))
    names = [f"a{k}" for k in range(len(ours.leaves))]
    parameters = ", ".join(f"{kind} {name}" for name, (_, kind, _) in zip(names, ours.leaves, strict=True))
    apart = compiled(f'extern "C" __global__ void k({parameters}, double *out) {{ {ours.body(names)} }}')
    results = []
    for module, args in (
        (one, {"p": ours.scalar if structured else ours.mapping}),
        (apart, dict(zip(names, (value for _, _, value in ours.leaves), strict=True))),
    ):
        before = [value.copy() for _, _, value in ours.leaves]
        out = np.zeros(64)
        launch = module.launch("k", 1, 64, {**args, "out": out}, unwritten=["out"])
        assert launch.findings == ()
        tensors = module.tensors("k", {**args, "out": out})
        traffic = {id(array): launch.traffic[name] for name, array in tensors.items()}
        assert len(tensors) == len(launch.traffic)
        after = [value.copy() for _, _, value in ours.leaves]
        counts = [
            (t.read_bytes, t.write_bytes, t.read_sectors, t.write_sectors, t.read_requests, t.write_requests)
            for t in (traffic[id(value)] for _, kind, value in ours.leaves if "*" in kind)
        ]
        results.append((out, after, counts))
        for (_, kind, value), old in zip(ours.leaves, before, strict=True):
            if "*" in kind:
                value[:] = old
    (out, after, counts), (want, wanted, expected) = results
    assert np.array_equal(out, want) and all(map(np.array_equal, after, wanted)) and counts == expected


PAIR = """struct T { const float *x; int n; };
struct P { char tag; T t[2]; float *y, *z; short m; };
extern "C" __global__ void k(const __grid_constant__ P p) {
  int i = threadIdx.x;
  if (i < p.t[1].n) p.y[i] = p.m * p.t[0].x[i] + p.tag;
  if (p.z) p.z[i] = p.t[1].x[i];
}"""


def pair(**changed: Any) -> dict[str, Any]:
    x, y = np.arange(32, dtype=np.float32), np.zeros(32, np.float32)
    t = [{"x": x, "n": np.int32(5)}, {"x": x + 1, "n": np.int32(7)}]
    return {"tag": np.int8(3), "t": t, "y": y, "z": None, "m": np.int16(2)} | changed


def test_names_are_the_fields_where_they_are_unique_else_paths() -> None:
    p = pair()
    launch = compiled(PAIR).launch("k", 1, 32, {"p": p}, unwritten=["y"])
    assert launch.findings == () and list(launch.traffic) == ["p.t[0].x", "p.t[1].x", "y"]
    assert p["y"].tolist() == [2.0 * i + 3 if i < 7 else 0 for i in range(32)]
    assert launch.traffic["p.t[0].x"].read_bytes == 28 and launch.traffic["p.t[1].x"].read_bytes == 0
    assert list(launch.unwritten) == ["y"] and np.array_equal(launch.unwritten["y"].any(1), np.arange(32) >= 7)
    assert list(compiled(PAIR).launch("k", 1, 32, {"p": p}, unwritten=["p.y"]).unwritten) == ["y"]
    assert list(compiled(PAIR).tensors(None, [p])) == ["arg0.t[0].x", "arg0.t[1].x", "y"]
    with pytest.raises(ValueError, match=r"got 'x'; they are p.t\[0\].x, p.t\[1\].x, y"):
        compiled(PAIR).launch("k", 1, 32, {"p": p}, unwritten=["x"])


def test_a_name_that_another_tensor_has() -> None:
    cuda = """__device__ float x[4], w[4];
    struct P { float *x, *w, *y; };
    extern "C" __global__ void k(P p, float *w, P q) { p.x[0] = p.w[0] = p.y[0] = w[0] + ::x[0] + ::w[0] + q.x[0]; }"""
    a, b, c, d = (np.zeros(4, np.float32) for _ in range(4))
    args = {"p": {"x": a, "w": b, "y": c}, "y": d, "q": {"x": a, "w": None, "y": None}}
    assert list(compiled(cuda).tensors("k", args)) == ["p.x", "p.w", "p.y", "y", "q.x"]
    with pytest.raises(TypeError, match=r"two tensors would be named 'p.y'"):
        compiled(cuda).tensors("k", {"p": args["p"], "p.y": d, "y": args["q"] | {"y": d}})


def test_the_same_array_in_two_fields_is_one_memory_with_two_counts() -> None:
    y = np.zeros(32, np.float32)
    args = {"p": pair(y=y, z=y)}
    launch = compiled(PAIR).launch("k", 1, 32, args)
    assert (launch.traffic["y"].write_bytes, launch.traffic["z"].write_bytes) == (28, 128)
    assert np.array_equal(y, np.arange(32) + 1)
    overlap = {"p": pair(y=y[1:], z=y)}  # thread i writes y[i + 1], and y[i]
    assert {f.kind for f in compiled(PAIR).launch("k", 1, 32, overlap).findings} == {"race"}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"m": 2}, r"k: argument 'p.m': the type of 2 in the structure is not known; pass np.int32\(2\), say"),
        ({"m": True}, r"pass np.bool_\(True\)"),
        ({"m": 2.5}, r"pass np.float32\(2.5\)"),
        ({"m": "2"}, "argument 'p.m': cannot pass str '2'"),
        ({"m": np.int64(2)}, None),
        ({"m": np.zeros(3, object)}, "'p.m': an array of objects"),
        ({"t": [np.int8(1), np.int64(1)]}, "argument 'p.t': the elements of an array are of one type"),
        (
            {"t": [pair()["t"][0]]},
            r"has 48 bytes, parameter k_param_0 has 64: p.tag at 0, p.t\[0\].x at 8, .*p.y at 24, .*p.m at 40",
        ),
        ({1: None}, "names of fields are text"),
    ],
)
def test_what_does_not_fit(changed: dict[Any, Any], says: str | None) -> None:
    if says is None:  # as many bytes, by the padding: only its own type tells
        assert compiled(PAIR).launch("k", 1, 32, {"p": pair(**changed)}).findings == ()
        return
    with pytest.raises(TypeError, match=says):
        compiled(PAIR).launch("k", 1, 32, {"p": {**pair(), **changed}})


def test_a_structured_scalar_has_its_own_offsets() -> None:
    inner = np.dtype([("x", object), ("n", "i4")], align=True)
    dtype = np.dtype(
        {
            "names": ["y", "t", "m", "tag", "z"],
            "formats": [object, (inner, 2), "i2", "i1", object],
            "offsets": [40, 8, 56, 0, 48],
            "itemsize": 64,
        }
    )
    p = pair()
    value = np.array((p["y"], [(part["x"], part["n"]) for part in p["t"]], 2, 3, None), dtype)
    for given in (value, value[()]):
        p["y"][:] = 0
        launch = compiled(PAIR).launch("k", 1, 32, {"p": given}, unwritten=["y"])
        assert set(launch.traffic) == {"p.t[0].x", "p.t[1].x", "y"} and launch.traffic["y"].write_bytes == 28
        assert p["y"].tolist() == [2.0 * i + 3 if i < 7 else 0 for i in range(32)]
    value["z"] = 5
    with pytest.raises(TypeError, match=r"argument 'p.z': a field of objects is a pointer, an array or None, got 5"):
        compiled(PAIR).launch("k", 1, 32, {"p": value})
    plain = np.zeros((), [("y", "u8"), ("n", "i4")])
    with pytest.raises(TypeError, match="got 12 bytes"):
        compiled(PAIR).launch("k", 1, 32, {"p": plain})


# -- what is found --------------------------------------------------------------------------------------------------------

STRUCT = """struct P { int n; const float *x; float *y, *z; float *many[4]; };
__device__ __noinline__ void write(const P &p, int k, float value) { p.many[k][threadIdx.x] = value; }
"""


def launch(
    body: str,
    grid: int = 1,
    head: str = "const __grid_constant__ P p",
    observe: Callable[[Module], Callable[[Access], None]] | None = None,
    **options: Any,
) -> Launch:
    """64 threads a block of a kernel of P; all arrays have 256 floats, those of `many` are named by their number."""
    source = f'{STRUCT}extern "C" __global__ void k({head}, int k) {{\nint t = threadIdx.x, b = blockIdx.x;\n{body}\n}}'
    rows = {name: np.zeros(256, np.float32) for name in "xyz"}
    rows["x"].flags.writeable = False
    many = [np.zeros(256, np.float32) for _ in range(4)]
    module = compiled(source)
    if observe is not None:
        options["observer"] = observe(module)
    return module.launch("k", grid, 64, {"p": {"n": np.int32(5), **rows, "many": many}, "k": 1}, **options)


def told(found: Launch) -> list[tuple[str, str | None]]:
    return [(f.kind, f.tensor) for f in found.findings]


BY_VALUE, CONSTANT = "P p", "const __grid_constant__ P p"
LOCAL = "float *copy[4];\nfor (int i = 0; i < 4; i++) copy[i] = p.many[(i + k) % 4];\n"

# A kernel of P, the head of its parameters, blocks, and the finding.
FAULTS = {
    "race of blocks": ("p.y[t] = b;", "", 2, ("race", "y")),
    "race of warps": ("p.y[t / 2] = p.y[63 - t];", "", 1, ("race", "y")),
    "race through an index": ("p.many[k][t] = b;", "", 2, ("race", "many[1]")),
    "race through a pointer that was chosen": ("(p.n == k ? p.y : p.z)[t] = b;", "", 2, ("race", "z")),
    "race through swapped pointers": (
        "if (k) { float *h = p.y; p.y = p.z; p.z = h; }\np.z[t] = b;\np.y[64 * b + t] = 1;",
        BY_VALUE,
        2,
        ("race", "y"),
    ),
    "race through a local copy": (
        "float *h = p.many[k]; p.many[k] = p.many[3];\np.many[t > 99][t] = b;\nh[64 * b + t] = 1;",
        BY_VALUE,
        2,
        ("race", "many[0]"),
    ),
    "race through pointers in local memory": (LOCAL + "copy[p.n - 4][t] = b;", "", 2, ("race", "many[2]")),
    "race through a function": ("write(p, k, b);", "", 2, ("race", "many[1]")),
    "out of bounds": ("p.z[8 * t] = 1;", "", 1, ("out of bounds", "z")),
    "read only": ("((float *)p.x)[t] = 1;", "", 1, ("read-only", "x")),
    "unwritten": ("if (t < 63) p.z[t] = 1;\np.y[t] = p.z[t];", "", 1, ("uninitialised", "z")),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", FAULTS)
def test_faults_name_the_field(name: str, seed: int | None) -> None:
    body, head, grid, fault = FAULTS[name]
    options: dict[str, Any] = {"seed": seed, "unwritten": ["z"]}
    assert told(launch(body, grid, head or CONSTANT, **options)) == [fault]
    if grid > 1:
        assert launch(body, 1, head or CONSTANT, **options).findings == ()


def test_what_no_store_reaches_costs_nothing() -> None:
    """Fields are told apart where the code says which one it takes."""
    source = f'{STRUCT}extern "C" __global__ void k(const __grid_constant__ P p) {{ p.z[threadIdx.x] = p.x[threadIdx.x] + p.n; }}'
    sharing = compiled(source).code("k").sharing
    assert sharing.written == {PointerField("k_param_0", 24)}
    # NVRTC reads n by its name or, now and then, by a generic address in the parameters.
    granules = {place: width for place, width in sharing.global_granules.items() if place != "parameters"}
    assert granules == {PointerField("k_param_0", 8): 4, PointerField("k_param_0", 24): 4}
    assert [sharing.writes(PointerField("k_param_0", at)) for at in (8, 16, 24, 32)] == [False, False, True, False]


# -- how code may come by a pointer of a structure ------------------------------------------------------------------------

# PTX that leaves the pointer at offset 8 of the parameter p in %rd1, and whether that one is known to be meant.
WAYS = {
    "by name": ("ld.param.u64 %rd1, [p+8];", True),
    "a vector": ("ld.param.v2.u64 {%rd2, %rd1}, [p];", True),
    "a vector without its first element": ("ld.param.v2.u64 {_, %rd1}, [p];", True),
    "halves": ("ld.param.v4.u32 {%r2, %r3, %r4, %r5}, [p]; mov.b64 %rd1, {%r4, %r5};", True),
    "halves, shifted": (
        "ld.param.u32 %r4, [p+8]; ld.param.u32 %r5, [p+12]; cvt.u64.u32 %rd2, %r4; cvt.u64.u32 %rd3, %r5; "
        "shl.b64 %rd3, %rd3, 32; or.b64 %rd1, %rd2, %rd3;",
        True,
    ),
    "its address": ("mov.b64 %rd2, p; ld.param.u64 %rd1, [%rd2+8];", True),
    "a sum": ("mov.b64 %rd2, p; add.s64 %rd3, %rd2, 16; ld.param.u64 %rd1, [%rd3+-8];", True),
    "the address of the field": ("mov.b64 %rd2, p+8; ld.param.u64 %rd1, [%rd2];", True),
    "a generic address": ("mov.b64 %rd2, p; cvta.param.u64 %rd3, %rd2; ld.u64 %rd1, [%rd3+8];", True),
    "an index": ("mov.b64 %rd2, p; mul.wide.u32 %rd3, %r9, 8; add.s64 %rd4, %rd2, %rd3; ld.param.u64 %rd1, [%rd4];", False),
    "a generic index": ("mov.b64 %rd2, p; mul.wide.u32 %rd3, %r9, 8; add.s64 %rd4, %rd2, %rd3; ld.u64 %rd1, [%rd4];", False),
    "a loop": (
        "mov.b64 %rd2, p; mov.u32 %r2, 0; again: setp.eq.u32 %p1, %r2, %r9; @%p1 bra out; add.s64 %rd2, %rd2, 8; "
        "add.u32 %r2, %r2, 1; bra again; out: ld.param.u64 %rd1, [%rd2];",
        False,
    ),
    "local memory": ("ld.param.u64 %rd2, [p+8]; st.local.u64 [stack], %rd2; ld.local.u64 %rd1, [stack];", None),
    "halves in local memory": (
        "ld.param.v2.u32 {%r2, %r3}, [p+8]; st.local.v2.u32 [stack], {%r2, %r3}; ld.local.u32 %r4, [stack]; "
        "ld.local.u32 %r5, [stack+4]; mov.b64 %rd1, {%r4, %r5};",
        None,
    ),
    "one of two kinds of memory": (
        "ld.param.u64 %rd2, [p+8]; st.local.u64 [stack], %rd2; mov.b64 %rd3, stack; cvta.local.u64 %rd4, %rd3; mov.b64 %rd5, p; "
        "setp.eq.u32 %p1, %r9, 7; selp.b64 %rd6, %rd5, %rd4, %p1; ld.u64 %rd1, [%rd6];",
        None,
    ),
}


@pytest.mark.parametrize("name", WAYS)
def test_every_way_to_a_pointer_of_a_structure(name: str) -> None:
    """Two blocks store there: a race. `known`: the field, one of the structure (False), anywhere (None)."""
    way, known = WAYS[name]
    registers = ".reg .b64 %rd<20>; .reg .b32 %r<20>; .reg .pred %p<4>; .local .align 8 .b8 stack[16];"
    body = f"ld.param.u32 %r9, [k]; {way} mov.u32 %r1, %ctaid.x; st.global.u32 [%rd1], %r1;"
    module = Module.from_ptx(kernel(body, [".align 16 .b8 p[24]", ".u32 k", ".u64 other"], registers))
    arrays = {name: np.zeros(4, np.int32) for name in "abc"}
    found = module.launch("k", 2, 1, {"p": arrays, "k": 1, "other": np.zeros(4)})
    assert told(found) == [("race", "b")] and found.traffic["b"].write_bytes == 8
    sharing = module.code("k").sharing
    reached = [sharing.writes(place) for place in (*(PointerField("p", at) for at in (0, 8, 16)), "other")]
    assert reached == {True: [False, True, False, False], False: [True, True, True, False], None: [True] * 4}[known]


# -- the analysis is sound ------------------------------------------------------------------------------------------------


def watched(module: Module) -> Callable[[Access], None]:
    """An observer that holds each access of the kernel k to what its code says: which tensors, and how wide at least."""
    code = module.code("k")
    may = dict(zip(code.instructions, reached(code.plans, code.params), strict=True))

    def look(access: Access) -> None:
        if access.segment is None or access.segment.space != "global":
            return
        (place,), places = access.segment.places, may[access.instruction]
        assert "*" in places or any(meets(found, place) for found in places), (access.instruction.text, place, places)
        assert code.sharing.writes(place) or not access.write
        assert code.sharing.global_granule([place]) <= np.min(access.size)

    return look


@pytest.mark.parametrize("name", FAULTS)
def test_accesses_of_structures_are_where_the_code_says(name: str) -> None:
    body, head, grid, _ = FAULTS[name]
    launch(body, grid, head or CONSTANT, observe=watched)


GALLERIES = {name: one for one in (gallery, tensor_gallery) for name in one.names}


@pytest.mark.parametrize("name", sample(GALLERIES, list(GALLERIES)[::12]))
def test_accesses_of_the_gallery_are_where_the_code_says(name: str) -> None:
    run = GALLERIES[name].make(name)
    module = compile_cuda(run.cuda, *run.options)
    module.launch("k", run.grid, run.block, run.args, shared_bytes=run.shared, observer=watched(module))
