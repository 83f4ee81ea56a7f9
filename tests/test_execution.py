"""theory == replay == execution, tensor by tensor, and the numbers, on the kernels' own PTX."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import strategies as st

from cupyflash import Device, Problem, Score, TileSchedule, plan
from cupyflash.sim import execute, replay, theory
from cupyflash.sim.execution import Execution, allocate, run
from cupyflash.sim.numbers.reference import reference
from cupyflash.sim.numbers.yardstick import draw, drawn, knowing_mask, measure
from cupyflash.sim.verification import score_dtype
from problems import any_problems, longest, orders
from suites import sample, sweep, wide

A100 = Device.named("A100-40GB")


def check_forward(schedule: TileSchedule, seed: int = 0, v_mean: float = 0.0, schedule_seed: int | None = None) -> Execution:
    """All that must hold of one execution."""
    schedule = knowing_mask(schedule, seed)
    inputs = drawn(schedule.problem, seed, v_mean)
    execution = execute(schedule, *inputs.qkv, seed=schedule_seed, **inputs.beside)
    assert execution.findings == ()
    assert theory.traffic(schedule) == replay(schedule) == execution.traffic
    numbers = measure(execution.out, execution.lse, inputs, score_dtype(schedule))
    assert all(each.good for each in numbers.values()), numbers
    return execution


ALGORITHMS = ("fa1", "fa2", "standard")


@pytest.mark.parametrize(
    ("d", "dtype", "causal", "algorithm"),
    sample(
        [
            *product([16, 48, 128], ["float16"], [False, True], ALGORITHMS),
            *product([16, 64], ["float32"], [False, True], ALGORITHMS),
        ],
        [
            *[(16, "float32", False, "fa1"), (128, "float16", True, "fa2")],
            *[(16, "float32", False, "fa2"), (16, "float32", True, "standard")],
        ],
    ),
)
def test_every_kind_of_kernel(algorithm: str, causal: bool, dtype: str, d: int) -> None:
    """Ragged lengths, several blocks each way, V away from zero."""
    problem = Problem(1, 2, 1, 75, 101, d, dtype, causal=causal)
    check_forward(plan(problem, A100.with_sram("28KB"), algorithm, lse=True), v_mean=1.0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_long_sums_of_floats(algorithm: str) -> None:
    """One sum of 2,048 float32 products has 1.2 to 2.9 times the allowed error: NumPy sums in parts, and so must the kernels."""
    schedule = plan(Problem(1, 1, 1, 16, 2048, 16, "float32"), A100, algorithm)
    inputs = drawn(schedule.problem, 1, 1.0)
    numbers = measure(execute(schedule, *inputs.qkv).out, None, inputs)["O"]
    assert numbers.error < 0.8 * numbers.allowed, numbers


LENGTHS = ((1, 1), (1, 200), (200, 1), (64, 64), (33, 97), (97, 33), (128, 320), (3, 0))


@pytest.mark.parametrize(
    ("n_q", "n_k", "causal", "algorithm"),
    sample(
        [(*lengths, *each) for lengths, each in product(LENGTHS, product([False, True], ALGORITHMS))],
        [(3, 0, True, "fa1"), (1, 200, True, "fa2"), *[(97, 33, True, algorithm) for algorithm in ALGORITHMS]],
    ),
)
def test_any_lengths(n_q: int, n_k: int, causal: bool, algorithm: str) -> None:
    problem = Problem(1, 1, 1, n_q, n_k, 64, "float16", causal=causal)
    check_forward(plan(problem, A100.with_sram("20KB"), algorithm, lse=True), v_mean=1.0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_queries_move_no_bytes(algorithm: str) -> None:
    """Nothing is launched, so key lengths and a head's slope are not read either."""
    slope = Score("s + slope[h]", slope=np.zeros(2, np.float32)).form
    for asked in ({"padded": True, "key_lengths": (3,)}, {"score": slope}, {"sinks": True, "mask": True, "bias": True}):
        problem = Problem(1, 2, 1, 0, 5, 64, "float16", **asked)
        schedule = knowing_mask(plan(problem, A100, algorithm, lse=True), 1)
        inputs = drawn(problem, 1)
        moved = execute(schedule, *inputs.qkv, score=inputs.score, **inputs.beside).traffic
        assert theory.traffic(schedule) == replay(schedule) == moved
        assert not any(each.read_bytes + each.write_bytes for each in moved.values())


@pytest.mark.wide
@pytest.mark.parametrize("device", ["T4", wide("A100-40GB"), wide("H100-SXM"), wide("RTX 4090")])
def test_every_generation_compiles_and_agrees(device: str) -> None:
    """sm_75 has neither cp.async nor mma m16n8k16; its path is another."""
    check_forward(plan(Problem(1, 2, 2, 130, 150, 64, "float16", causal=True), Device.named(device), lse=True))


@pytest.mark.parametrize(
    ("algorithm", "dtype"),
    sample(
        product(ALGORITHMS, ["float16", "bfloat16", "float32"]),
        [("fa1", "bfloat16"), ("fa2", "float16")],
    ),
)
@sweep(1, 3)
def test_random_problems(algorithm: str, dtype: str, data: st.DataObject) -> None:
    """In the wide suite over a hundred; nearly as many again have block masks or sinks, or are packed."""
    tiling = data.draw(st.sampled_from([None, (16, 16), (48, 32)]))
    name, sram = data.draw(st.sampled_from(["A100-40GB", "H100-SXM"])), data.draw(st.sampled_from([None, "64KB"]))
    lse, v_mean = data.draw(st.booleans()), data.draw(st.sampled_from([0.0, 1.0]))
    for problem in data.draw(any_problems(dtype, most=longest(tiling))):
        schedule = plan(problem, Device.named(name, sram=sram), algorithm, tiling, lse=lse)
        check_forward(schedule, data.draw(st.integers(0, 99)), v_mean, data.draw(orders(problem)))


@pytest.mark.parametrize(
    ("algorithm", "dtype", "orders"),
    [("fa2", "float16", 1), *(wide(*one, 3) for one in product(ALGORITHMS, ["float16", "float32"]))],
)
def test_every_schedule_seed_gives_the_same_bits(algorithm: str, dtype: str, orders: int) -> None:
    problem = Problem(1, 2, 1, 50, 70, 32, dtype, causal=True)
    schedule = plan(problem, A100, algorithm, (32, 32), lse=True)
    first = check_forward(schedule)
    for seed in range(orders):
        again = check_forward(schedule, schedule_seed=seed)
        assert again.out.tobytes() == first.out.tobytes()
        assert again.lse is not None and first.lse is not None and again.lse.tobytes() == first.lse.tobytes()
        assert again.traffic == first.traffic


@pytest.mark.parametrize(("n_q", "n_k", "d"), [wide(64, 128, 64), wide(128, 128, 128), (70, 100, 64), wide(16, 17, 40)])
def test_theorem_1_flops(n_q: int, n_k: int, d: int) -> None:
    """4 Nq Nk d, on rows padded to a warp's 16, columns to a sub-tile and d to 16; nothing else is multiplied."""
    schedule = plan(Problem(1, 1, 1, n_q, n_k, d, "float16"), A100, "fa1", (64, 64))
    flops = check_forward(schedule).counters["fa1_forward"].mma_flops
    sub = dict(schedule.kernels()[0].constants)["SUB"]
    assert isinstance(sub, int)
    rows, cols = -(-n_q // 16) * 16, sum(-(-min(64, n_k - j) // sub) * sub for j in range(0, n_k, 64))
    assert flops == 4 * rows * cols * (-(-d // 16) * 16)
    assert flops >= schedule.problem.flops
    if n_q % 64 == n_k % 64 == d % 16 == 0:
        assert flops == schedule.problem.flops


def test_theorem_1_extra_memory() -> None:
    """l and m alone in float32: 8 bytes a row, whatever d. Half types add O_acc, and so are not O(N) in Nq x d."""
    for n in (100, 1000):
        for d in (16, 128):
            assert plan(Problem(2, 3, 3, n, n, d, "float32"), A100, "fa1").workspace_bytes == 2 * 3 * n * 8
            assert plan(Problem(2, 3, 3, n, n, d, "float16"), A100, "fa1").workspace_bytes == 2 * 3 * n * (8 + 4 * d)
            assert plan(Problem(2, 3, 3, n, n, d, "float16"), A100, "fa2").workspace_bytes == 0


@pytest.mark.parametrize(
    ("dtype", "causal"), [("float16", True), wide("float16", False), wide("float32", True), wide("float32", False)]
)
def test_theorem_1_induction(dtype: str, causal: bool) -> None:
    """After j outer steps HBM holds O, l and m of softmax over the first j blocks of keys."""
    n, d, bc = 80, 32, 16
    schedule = plan(Problem(1, 1, 1, n, n, d, dtype, causal=causal), A100, "fa1", (16, bc))
    q, k, v = (array[0, 0] for array in draw(schedule.problem, v_mean=1.0))
    out, spaces = np.zeros_like(q), allocate(schedule)
    steps = 0

    def look(block: int, barriers: int) -> None:
        # The kernel has two barriers an outer step; the first says that every warp is done with the step before.
        nonlocal steps
        if barriers % 2 == 0 or barriers == 1:
            return
        steps += 1
        seen = steps * bc
        S = q.astype(np.float64) @ k[:seen].T.astype(np.float64) / np.sqrt(d)
        if causal:
            rows, cols = np.indices(S.shape)
            S = np.where(cols <= rows, S, -np.inf)
        m = S.max(axis=1)
        l = np.exp(S - m[:, None]).sum(axis=1)  # noqa: E741 (the paper's name)
        state = spaces.get("O_acc", out)
        # Rows that will see no later block have their O in the output's own type already.
        rows_left = np.arange(n) // 16 * 16 >= seen - bc if causal and dtype != "float32" else np.full(n, True)
        rows_left &= np.arange(n) // 16 >= steps if causal and dtype != "float32" else True
        expected = np.exp(S - m[:, None]) / l[:, None] @ v[:seen].astype(np.float64)
        assert np.allclose(state.reshape(n, d)[rows_left], expected[rows_left], atol=2e-3 if dtype == "float16" else 1e-5)
        assert np.allclose(spaces["m"].ravel(), m, atol=1e-4) and np.allclose(spaces["l"].ravel(), l, rtol=1e-3)

    run(schedule, {"q": q, "k": k, "v": v, "out": out}, workspaces=spaces, on_barrier=look)
    assert steps == n // bc - 1
    assert np.allclose(out.astype(np.float64), reference(q, k, v, causal=causal)[0], atol=2e-3)


def test_execute_refuses_arrays_of_another_problem() -> None:
    schedule = plan(Problem(1, 1, 1, 32, 32, 64, "float16"), A100)
    q = np.zeros((32, 64), np.float16)
    with pytest.raises(ValueError, match="the arrays pose"):
        execute(schedule, q, q[:16], q[:16])
