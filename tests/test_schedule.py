"""Tilings and schedules: the paper's formula, what fits, and theory == replay == literal replay."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cupyflash import Device, Problem, plan
from cupyflash.multiprocessor import Multiprocessor
from cupyflash.request.options import BlockMask
from cupyflash.schedules import (
    ALGORITHMS,
    VARLEN_ALGORITHMS,
    Cache,
    TileSchedule,
    decode_tiles,
    fa1_backward,
    fa2_backward_tiles,
    fa2_tiles,
    fa3_tiles,
    mask_tiles,
    plan_backward,
    plan_decode,
    plan_varlen,
    row_bases,
)
from cupyflash.schedules.base import padded_dim
from cupyflash.schedules.decode import Cached
from cupyflash.schedules.varlen import Fa3VarlenSchedule
from cupyflash.sim import SramOverflow, replay, run, theory
from cupyflash.sim.two_level import machine
from cupyflash.sim.two_level.steps import Steps
from cupyflash.tiling import DoesNotFit, TileSize

A100 = Device.named("A100-40GB")


def square(n: int, d: int, dtype: str = "float16", causal: bool = False) -> Problem:
    return Problem(1, 1, 1, n, n, d, dtype, causal=causal)


@pytest.mark.parametrize(
    ("device", "d", "dtype", "rows", "cols"),
    [
        ("A100-40GB", 64, "float16", 64, 326),
        ("A100-40GB", 128, "float16", 128, 163),
        ("A100-40GB", 64, "float32", 64, 163),
        ("A100-40GB", 1, "float16", 1, 20864),
        ("H100-SXM", 128, "float16", 128, 227),
        ("T4", 64, "float16", 64, 128),
        ("A100-40GB", 256, "float16", 82, 82),
    ],
)
def test_paper_blocks_are_the_formula(device: str, d: int, dtype: str, rows: int, cols: int) -> None:
    paper = plan(square(1024, d, dtype), Device.named(device), "fa1").tiling.paper
    assert (paper.block_rows, paper.block_cols) == (rows, cols)


@given(
    d=st.integers(1, 256),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    sram=st.integers(1, 512 * 1024),
    algorithm=st.sampled_from(["fa1", "fa2", "standard"]),
)
def test_what_is_fitted_fits_and_what_does_not_says_how_much_it_needs(d: int, dtype: str, sram: int, algorithm: str) -> None:
    problem, device = square(1000, d, dtype), A100.with_sram(sram)
    try:
        schedule = plan(problem, device, algorithm)
    except DoesNotFit as error:
        need = int(str(error).split("at least ")[1].split(" bytes")[0].replace(",", ""))
        assert need > sram
        plan(problem, A100.with_sram(need), algorithm)  # and with that it does
        return
    assert run(schedule).peak_sram_bytes <= sram
    if algorithm == "fa1":
        paper, used = schedule.tiling.paper, schedule.tiling.used
        assert used.block_rows % 16 == used.block_cols % 16 == 0
        assert used.block_cols <= max(16, paper.block_cols)
        assert used.block_rows <= max(16, paper.block_rows)
        assert max(kernel.shared_bytes for kernel in schedule.kernels()) == run(schedule).peak_sram_bytes


@given(
    planned=st.sampled_from(
        [(plan, "fa1"), (plan, "fa2"), (plan, "standard"), *((plan_backward, name) for name in ("fa1", "fa2"))]
    ),
    d=st.sampled_from([16, 33, 64, 128, 256]),
    dtype=st.sampled_from(["float16", "float32"]),
    tiling=st.none() | st.tuples(*[st.sampled_from([16, 32, 64])] * 2),
    options=st.fixed_dictionaries(
        {}, optional={"deterministic": st.booleans(), "mask": st.booleans(), "block_mask": st.just(True)}
    ),
)
@settings(max_examples=30)
def test_a_refusal_names_the_least_bytes_with_which_it_runs(
    planned: tuple[Callable[..., TileSchedule], str], d: int, dtype: str, tiling: tuple[int, int] | None, options: dict[str, bool]
) -> None:
    """From a byte on: each refusal asks for more, at last as many as run; with one byte less nothing does."""
    (how, algorithm), problem = planned, square(100, d, dtype).asking(mask=options.pop("mask", False))
    if options.pop("block_mask", False) and tiling and algorithm != "standard":
        problem = problem.asking(block_mask=BlockMask((1, 1, *(-(-100 // size) for size in tiling))))
    if how is plan:
        options.pop("deterministic", None)

    def needed(sram: int) -> int | None:
        """The bytes that a refusal asks for; None if it runs, or does not for another reason."""
        try:
            how(problem, A100.with_sram(sram), algorithm, tiling, **options).kernels()
        except DoesNotFit as error:
            said = re.search(r"needs (?:at least )?([\d,]+) bytes", str(error))
            return int(said[1].replace(",", "")) if said else None
        return None

    least = 1
    while more := needed(least):
        assert more > least
        least = more
    assert needed(least - 1) == least


def test_too_small_an_sram_says_how_many_bytes_are_needed() -> None:
    with pytest.raises(DoesNotFit, match="25,344 bytes"):
        plan(square(1024, 256), A100.with_sram("8KB"), "fa1")
    for chooses in (fa2_tiles.choose, fa2_tiles.fit, fa2_tiles.finalists):
        with pytest.raises(DoesNotFit, match="at least 24,576 bytes"):
            chooses(square(1024, 256), A100.with_sram("8KB"))


@pytest.mark.parametrize(
    "tiling", ["Paper", 64, (64,), (0, 16), (16.0, 16), (16, 16, 16), (True, 16), [16, 16], TileSize(0, 16, "")]
)
def test_bad_tilings_are_refused(tiling: object) -> None:
    with pytest.raises(ValueError, match="tiling must be"):
        plan(square(64, 64), A100, "fa1", tiling)  # type: ignore[arg-type]


def test_unknown_algorithm_is_refused() -> None:
    with pytest.raises(ValueError, match="fa1, fa2, fa3, standard"):
        plan(square(64, 64), A100, "fa9")


@pytest.mark.parametrize("name", sorted({*ALGORITHMS, "fa4"} - {*VARLEN_ALGORITHMS}))
def test_packed_sequences_refuse_algorithms_that_do_not_have_them(name: str) -> None:
    with pytest.raises(ValueError, match=f"algorithm must be one of fa2, fa3, got {name!r}"):
        plan_varlen(square(64, 64), Device.named("H100-SXM"), algorithm=name)


@pytest.mark.parametrize("algorithm", VARLEN_ALGORITHMS)
def test_packed_sequences_have_a_plan_of_their_own(algorithm: str) -> None:
    with pytest.raises(ValueError, match="packed sequences are planned by plan_varlen"):
        plan(square(64, 64).asking(packed=True), Device.named("H100-SXM"), algorithm)


@pytest.mark.parametrize("blocks", [(64, 48), (16, 128), (48, 64), (80, 16)])
def test_bases_are_found_in_whole_parts_of_a_mask_s_blocks(blocks: tuple[int, int]) -> None:
    used = row_bases.fit(square(512, 64, "float32"), A100, blocks).used
    assert blocks[0] % used.block_rows == 0 and blocks[1] % used.block_cols == 0


@pytest.mark.parametrize("window", [None, 4, 40])
def test_a_row_tile_reads_the_blocks_that_its_queries_see_and_the_last_one_the_newest_key(window: int | None) -> None:
    """Of a cache of 410 keys to which as many are added as there are queries."""
    problem = Problem(1, 1, 1, 600, 1100, 64, "float16", causal=True, window=window and (window, None))
    schedule = plan_decode(problem.asking(padded=True, key_lengths=(410,)), A100, Cache(600))
    sequence, rows, cols = Cached.of(schedule, 0), schedule.block_rows, schedule.block_cols
    assert schedule.row_tiles > 2
    for number in range(schedule.row_tiles):
        begin = 0 if window is None else 410 + number * rows - window
        if number == schedule.row_tiles - 1:
            begin = min(begin, 410)
        assert sequence.tile(number) == (begin // cols, -(-(410 + min((number + 1) * rows, 600)) // cols))


def test_kernels_refuse_what_they_cannot_run() -> None:
    with pytest.raises(ValueError, match=r"steps of 16.*Br 64 x Bc 326.*Br 64 x Bc 320"):
        plan(square(64, 64), A100, "fa1", "paper").kernels()
    with pytest.raises(DoesNotFit, match="shared memory"):
        plan(square(64, 64), A100, "fa1", (64, 4096)).kernels()
    with pytest.raises(ValueError, match="compute capability"):
        plan(square(64, 64, "bfloat16"), Device.named("T4")).kernels()
    with pytest.raises(ValueError, match=r"steps of 16.*Br 64 x Bc 326"):
        plan(square(64, 64), A100, "fa2", "paper").kernels()
    with pytest.raises(DoesNotFit, match="bytes of SRAM"):
        plan(square(64, 64), A100, "fa2", (64, 4096)).kernels()


SPARSE = replace(square(100, 64), block_mask=np.ones((5, 5), bool))


@pytest.mark.parametrize("planned", [plan, plan_backward])
@pytest.mark.parametrize(
    ("algorithm", "problem", "tiling", "says"),
    [
        ("fa1", square(64, 64), (20, 20), "in steps of 16.*; the nearest blocks that run are Br 16 x Bc 16"),
        ("fa2", square(64, 64), (40, 60), "in steps of 16.*; the nearest blocks that run are Br 48 x Bc 64"),
        ("standard", square(64, 64), (7, 16), "in steps of 16.*; the nearest blocks that run are Br 16 x Bc 16"),
        ("fa2", SPARSE, (20, 20), "the nearest blocks that run are Br 16 x Bc 16"),
        ("fa1", SPARSE, (32, 32), r"\(\.\.\., 4, 4\) for blocks of Br 32 x Bc 32"),
        ("fa2", SPARSE, (32, 32), r"\(\.\.\., 4, 4\) for blocks of Br 32 x Bc 32"),
    ],
)
def test_blocks_that_no_kernel_runs_are_refused_with_the_nearest(
    planned: Callable[..., TileSchedule], algorithm: str, problem: Problem, tiling: tuple[int, int], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        planned(problem, A100, algorithm, tiling)


@pytest.mark.parametrize(
    ("planned", "algorithm", "asked"),
    [(plan, "fa2", (512, 256)), (plan, "fa2", (64, 4096)), (plan, "fa1", (64, 4096)), (plan_backward, "fa1", (128, 128))],
)
def test_the_nearest_blocks_run_and_those_between_do_not(
    planned: Callable[..., TileSchedule], algorithm: str, asked: tuple[int, int]
) -> None:
    """Too many warps, and too little SRAM."""
    with pytest.raises(ValueError, match="the nearest blocks") as refused:
        planned(square(64, 64), A100, algorithm, asked)
    rows, cols = (int(word) for word in re.findall(r"nearest blocks that run are Br (\d+) x Bc (\d+)", str(refused.value))[0])
    planned(square(64, 64), A100, algorithm, (rows, cols))
    for wider in [(rows + 16, cols)] * (rows < asked[0]) + [(rows, cols + 16)] * (cols < asked[1]):
        with pytest.raises(ValueError, match="the nearest blocks"):
            planned(square(64, 64), A100, algorithm, wider)


def test_blocks_to_count_with_need_no_kernel() -> None:
    """A TileSize is taken as it is, forwards and backwards."""
    tile = TileSize(20, 23, "for counts")
    for planned in (plan, plan_backward):
        for algorithm in ("fa1", "standard"):
            schedule = planned(square(100, 64), A100, algorithm, tile)
            assert schedule.tiling.used == tile and theory.traffic(schedule) == replay(schedule)
            with pytest.raises(ValueError, match="steps of 16"):
                schedule.kernels()


@st.composite
def any_problem(draw: st.DrawFn) -> Problem:
    batch, seqlen_k = draw(st.integers(1, 3)), draw(st.integers(0, 300))
    lengths = draw(st.none() | st.tuples(*[st.integers(0, seqlen_k)] * batch))
    return Problem(
        batch,
        draw(st.sampled_from([2, 4])),
        draw(st.sampled_from([1, 2])),
        draw(st.integers(0, 300)),
        seqlen_k,
        draw(st.integers(1, 256)),
        draw(st.sampled_from(["float16", "bfloat16", "float32"])),
        causal=draw(st.booleans()),
        head_dim_v=draw(st.none() | st.integers(1, 256)),
        mask=draw(st.booleans()),
        bias=draw(st.booleans()),
        padded=lengths is not None,
        key_lengths=lengths,
    )


problems = any_problem()
blocks = st.builds(TileSize, st.integers(1, 80), st.integers(1, 80), st.just("drawn, whether a kernel runs it or not"))


any_plan = given(
    problem=problems,
    algorithm=st.sampled_from(["fa1", "fa2", "standard"]),
    tiling=st.none() | blocks,
    lse=st.booleans(),
)


@settings(max_examples=40)
@any_plan
def test_theory_is_replay_is_literal_replay(problem: Problem, algorithm: str, tiling: TileSize | None, lse: bool) -> None:
    schedule = plan(problem, A100.with_sram("1MB"), algorithm, tiling, lse=lse)
    assert theory.traffic(schedule) == replay(schedule) == replay(schedule, literal=True)


@pytest.mark.wide
@settings(max_examples=120)
@any_plan
def test_theory_is_replay_is_literal_replay_widely(problem: Problem, algorithm: str, tiling: TileSize | None, lse: bool) -> None:
    schedule = plan(problem, A100.with_sram("1MB"), algorithm, tiling, lse=lse)
    assert theory.traffic(schedule) == replay(schedule) == replay(schedule, literal=True)


@given(problem=problems)
def test_the_ideal_standard_count_is_one_tile(problem: Problem) -> None:
    assume(problem.seqlen_q and problem.seqlen_k)
    assert theory.traffic(plan(problem, A100, "standard", "paper")) == theory.standard_ideal(problem)


@pytest.mark.parametrize(("tiling", "passes"), [("paper", 1), (None, 2)])
def test_softmax_reads_s_once_in_the_paper_and_twice_in_the_kernel(tiling: str | None, passes: int) -> None:
    moves = [move for walk in plan(square(64, 64), A100, "standard", tiling).walks() for move in walk.moves]
    assert [move.tensor.name for move in moves if not move.write] == ["Q", "K", *["S"] * passes, "P", "V"]


EXAMPLE = TileSize(2, 4, "small enough for paper and pencil")


def test_tables_of_the_design() -> None:
    """One head, N 8, d 4, Br 2, Bc 4, float32: R = 16 visits of a row."""
    form = theory.traffic(plan(square(8, 4, "float32"), A100, "fa1", EXAMPLE))
    assert (form.read_bytes, form.write_bytes) == (4 * (2 * 8 * 4 + 16 * (2 * 4 + 2)), 4 * (16 + 8) * (4 + 2))
    form = theory.traffic(plan(square(8, 4, "float32", causal=True), A100, "fa1", EXAMPLE))  # R = 2 (1 + 1 + 2 + 2)
    assert (form.read_bytes, form.write_bytes) == (4 * (2 * 8 * 4 + 12 * (2 * 4 + 2)), 4 * (12 + 8) * (4 + 2))
    form = theory.traffic(plan(square(8, 4, "float32"), A100, "fa2", EXAMPLE, lse=True))
    assert (form.read_bytes, form.write_bytes) == (4 * (8 * 4 + 2 * 4 * 4 * 8), 4 * (8 * 4 + 8))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "standard"])
def test_a_million_tokens_are_counted_not_walked(algorithm: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A walk would take 50 million turns."""
    schedule = plan(square(1 << 20, 128, causal=causal), A100, algorithm)
    short = plan(square(1 << 10, 128, causal=causal), A100, algorithm, (64, 64))
    turns: list[int] = []

    def noted(*given: Any) -> Steps:
        turns.append(int((steps := Steps(*given)).turns.sum()))
        return steps

    monkeypatch.setattr(machine, "Steps", noted)
    assert replay(schedule) == theory.traffic(schedule) and not turns
    assert replay(short, literal=True) == theory.traffic(short) and sum(turns) > 32  # walked


def test_a_tile_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(SramOverflow, match="does not fit"):
        replay(plan(square(1024, 64), A100, "fa1", TileSize(64, 4096, "too wide")))


def test_paper_tiling_holds_four_tiles() -> None:
    """K, V, Q and O as the paper counts them: exactly M when 4d divides it and Br = Bc."""
    device = A100.with_sram(4 * 64 * 32 * 2)
    assert run(plan(square(1024, 64), device, "fa1", "paper")).peak_sram_bytes == device.sram_per_block


def test_a_kernel_may_be_replaced_by_others_of_its_blocks_and_never_by_itself() -> None:
    kernels = [kernel for d in (64, 128) for kernel in plan(square(1024, d), A100, "fa2").kernels()]
    assert any(kernel.instead for kernel in kernels)
    for kernel in kernels:
        constants = [each.constants for each in (replace(kernel, instead=()), *kernel.instead)]
        assert all(one != other for one, other in combinations(constants, 2))


def test_steps_that_no_blocks_of_fa2_take_are_said() -> None:
    with pytest.raises(DoesNotFit, match="runs blocks in steps of 16; the tiling asks for Br 24 x Bc 40"):
        fa2_tiles.choose(square(100, 64), A100, (24, 40))


def test_the_backward_keeps_a_mask_of_each_head_that_shares_a_key() -> None:
    def room(heads: int, kv_heads: int) -> int:
        mask = np.ones((1, heads, 4, 4), bool)
        asked = Problem(1, heads, kv_heads, 64, 64, 64, "float16", block_mask=BlockMask.of(mask))
        return fa1_backward.tiles(asked, 16, 16)["block_mask"].nbytes

    assert room(4, 1) == 2 * room(4, 2) == 4 * room(4, 4) > 0


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_mask_s_states_have_room_just_where_they_are_read(more: int) -> None:
    """Up to the most bytes that a thread block keeps of them; the room's unit changes nothing there."""
    for block in (16, 32):
        length = mask_tiles.MOST_STATE_BYTES // 8 * 32 * block + more
        asked = Problem(1, 1, 1, 40, length, 64, "float16", mask=True)
        turned = replace(asked, seqlen_q=length, seqlen_k=40)
        forward, backward = plan(asked, A100, "fa2", (16, block)), plan_backward(turned, A100, "fa2", (block, 16))
        assert backward.block_rows == block
        for schedule, words in ((forward, mask_tiles.words(length, block)), (backward, backward.state_words)):
            room = {each.name: each.nbytes for each in schedule._tiles()}["block_mask"]  # type: ignore[attr-defined]
            assert bool(schedule.mask_tiles) == (room > 0) == (more <= 0)
            assert room == (-(-8 * words // mask_tiles.STEP_BYTES) * mask_tiles.STEP_BYTES if room else 0)


@pytest.mark.parametrize("problem", [square(64, 64), square(64, 80, "float32")])
def test_registers_are_estimated_by_kind_of_chip(problem: Problem) -> None:
    """Sixteen more than on the data centre's chips from 12.0 on, eight on other small ones; 11.0 is one of these."""
    config = next(fa2_tiles.configs(problem, (64, 64)))

    def estimate(*capability: int) -> int:
        return fa2_tiles.registers(problem, replace(A100, compute_capability=capability), config)

    least = estimate(8, 0)
    assert [estimate(*each) - least for each in ((9, 0), (10, 3), (8, 6), (8, 9), (11, 0), (12, 0), (12, 1))] == [
        0,
        0,
        8,
        8,
        8,
        16,
        16,
    ]


def test_a_multiprocessor_has_whole_warps_and_whole_blocks() -> None:
    """CUDA C++ Programming Guide, technical specifications of compute capabilities."""
    large, small = {(8, 0), (9, 0), (10, 0), (10, 3)}, {(8, 6), (8, 7), (8, 9), (11, 0), (12, 0), (12, 1)}
    for threads, capabilities in ((2048, large), (1536, small), (1024, {(7, 5)})):
        assert {Multiprocessor.of(each).threads for each in capabilities} == {threads}
    assert {each: Multiprocessor.of(each).blocks for each in large} == dict.fromkeys(large, 32)
    assert {Multiprocessor.of(each).blocks for each in ((7, 5), (8, 6), (8, 7))} == {16}
    assert {Multiprocessor.of(each).blocks for each in ((8, 9), (11, 0), (12, 0), (12, 1))} == {24}


@pytest.mark.parametrize(("d", "dtype"), [(64, "float16"), (128, "float16"), (40, "float16"), (64, "float32"), (128, "float32")])
def test_what_fills_the_sram_exactly_fits(d: int, dtype: str) -> None:
    """Not even a choice of warps or stages changes if the SRAM is just as large as the largest kernel's tiles."""
    problem = square(256, d, dtype)
    kernels = plan_backward(problem, A100, deterministic=True).kernels()
    least = A100.with_sram(max(kernel.shared_bytes for kernel in kernels))
    again = plan_backward(problem, least, deterministic=True).kernels()
    assert [(each.name, each.constants) for each in again] == [(each.name, each.constants) for each in kernels]


@pytest.mark.parametrize("short", [0, 1, 2])
def test_packed_sequences_are_taken_together_by_where_their_keys_begin(short: int) -> None:
    """The third sequence begins as many keys before those that are taken together end."""
    lengths = [8192, 8192 - short, 8192, 8192, 5] * 4
    whole = Problem(len(lengths), 2, 2, 8192, 8192, 128, "bfloat16", causal=True)
    made = plan_varlen(whole, Device.named("H100-SXM"), tuple((n, n) for n in lengths), algorithm="fa3")
    assert isinstance(made, Fa3VarlenSchedule)
    assert made.grouping.keys_together == 2 * 8192
    begins = np.cumsum([0, *lengths[:-1]])
    blocks = begins // made.block_rows + np.arange(len(lengths))
    assert (made.items.first_key[blocks] // made.grouping.keys_together).tolist() == (
        begins // made.grouping.keys_together
    ).tolist()


@given(st.integers(1, 256), st.booleans(), st.booleans(), st.sampled_from(["T4", "A100-40GB", "H100-SXM", "RTX 5090"]))
def test_a_head_takes_the_rows_of_its_padded_width(d: int, mask: bool, bias: bool, device: str) -> None:
    def rows(head_dim: int) -> int:
        problem = Problem(1, 1, 1, 64, 64, head_dim, "float16", mask=mask, bias=bias, alignment=2)
        return fa2_backward_tiles.most_rows(problem, Device.named(device), fa2_backward_tiles.Warps(16, 16))

    assert rows(d) == rows(padded_dim(d))


def test_decoding_s_ring_may_be_as_large_as_what_the_warps_join() -> None:
    problem = Problem(1, 1, 1, 17, 300, 32, "float16", head_dim_v=16)
    full = [
        each
        for each in decode_tiles.candidates(problem, Device.named("T4"))
        if dict(each.rooms)["K, V"] == (each.config.key_warps - 1) * each.config.row_warps * each.config.row_tiles * 3 * 32 * 16
    ]
    assert full and not any(each.rejected for each in full)


@pytest.mark.parametrize(("sram", "words"), [(45, "1 Q and dO block"), (20, "Q and dO by turns")])
def test_gradients_of_wide_heads_say_their_room(sram: int, words: str) -> None:
    problem = Problem(1, 1, 1, 45, 70, 16, "float16", head_dim_v=272)
    device = replace(Device.named("A100-40GB"), sram_per_block=sram << 10)
    assert words in str(plan_backward(problem, device, "fa2").tiling)


@pytest.mark.parametrize("d_v", [1, 64, 65, 127, 128, 129, 144, 145, 256])
def test_warpgroups_take_turns_by_the_padded_width_of_v(d_v: int) -> None:
    def turns(head_dim_v: int) -> bool:
        problem = Problem(1, 1, 1, 300, 300, 64, "bfloat16", head_dim_v=head_dim_v)
        return fa3_tiles.candidate(problem, Device.named("H100-SXM"), fa3_tiles.TEAMS[0], 64).config.ping_pong

    assert turns(d_v) == turns(padded_dim(d_v)) == (d_v <= 128)


@pytest.mark.parametrize(("d", "d_v", "widest"), [(64, 264, 264), (264, 64, 264), (272, 300, 300)])
def test_fa3_refuses_heads_of_which_either_side_is_wide(d: int, d_v: int, widest: int) -> None:
    said = fa3_tiles.refusal(Problem(1, 1, 1, 64, 64, d, "float16", head_dim_v=d_v), Device.named("H100-SXM"))
    assert said == f"the kernel takes d and d_v up to 256, and this has {widest}"
