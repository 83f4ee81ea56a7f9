"""The L2: the model is a plain simulator of lines, has the closed forms where there are any, and asks for what theory counts."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import strategies as st

from cupyflash import Device, Problem, plan
from cupyflash.schedules import TileSchedule, plan_backward, plan_decode
from cupyflash.sim import l2, theory
from cupyflash.sim.cli import main
from cupyflash.sim.l2 import L2, LINE, SECTOR
from cupyflash.sim.l2.cache import Requests, SectoredCache
from cupyflash.sim.l2.launch import DeviceMemory
from cupyflash.sim.l2.played import PlayedWalk
from cupyflash.sim.pictures.plot import draw
from cupyflash.sim.traffic import TensorTraffic, Traffic
from suites import sample, sweep

A100, H100, T4 = (Device.named(name) for name in ("A100-40GB", "H100-SXM", "T4"))
PAGE = (Path(__file__).parents[1] / "docs" / "l2.md").read_text()
Access = tuple[str, int, int, bool]  # tensor, address, bytes, whether it is written


class Plain:
    """The L2 line by line and sector by sector."""

    def __init__(self, cache: L2) -> None:
        self.l2 = cache
        self.sets: defaultdict[int, list[int]] = defaultdict(list)  # lines, the least recently used first
        self.there: dict[int, set[int]] = {}
        self.dirty: dict[int, set[int]] = {}
        self.tensor: dict[int, str] = {}
        self.read: defaultdict[str, int] = defaultdict(int)
        self.written: defaultdict[str, int] = defaultdict(int)

    def set_of(self, line: int) -> int:
        number, place = divmod(line, self.l2.sets)
        unit = self.l2.rotated
        hashed = (number * 0x9E3779B97F4A7C15 % 2**64 >> 40) % (self.l2.sets // unit)
        return (place + hashed * unit) % self.l2.sets

    def leave(self, line: int) -> None:
        self.written[self.tensor[line]] += SECTOR * len(self.dirty.pop(line))
        del self.there[line]

    def access(self, tensor: str, first: int, nbytes: int, write: bool) -> None:
        for sector in range(first // SECTOR, -(-(first + nbytes) // SECTOR)):
            line = sector * SECTOR // LINE
            held = self.sets[self.set_of(line)]
            if line in held:
                held.remove(line)
            else:
                self.there[line], self.dirty[line], self.tensor[line] = set(), set(), tensor
                if len(held) == self.l2.ways:
                    self.leave(held.pop(0))
            held.append(line)
            if not write and sector not in self.there[line]:
                self.read[tensor] += SECTOR
            self.there[line].add(sector)
            if write:
                self.dirty[line].add(sector)

    @property
    def dram(self) -> Traffic:
        for line in list(self.there):
            self.leave(line)
        return Traffic({name: TensorTraffic(self.read[name], self.written[name]) for name in {*self.read, *self.written}})


geometries = st.builds(lambda sets, ways: L2(sets * ways * LINE, ways), st.sampled_from([1, 2, 3, 6, 16, 40]), st.integers(1, 5))


@sweep(15, 300)
def test_random_streams_are_those_of_a_plain_simulator(data: st.DataObject) -> None:
    """Requests of any begin and size, in several turns, some of them the same."""
    cache, unit = data.draw(geometries), data.draw(st.sampled_from([4, 32, 96, 128, 256, 1024]))
    room = 64 * unit
    base = -(-room // (256 * LINE)) * 256 * LINE
    size = st.integers(1, 8)
    drawn = data.draw(
        st.lists(
            st.tuples(st.integers(0, 3), st.integers(0, 1), st.integers(0, 1), st.integers(0, 55), size, st.booleans()), max_size=60
        )
    )
    model, plain = SectoredCache(cache, [0, base], unit, [False, False]), Plain(cache)
    parts = [Requests.of(t, base * x + a * unit, n * unit).of_move(m, w) for t, m, x, a, n, w in drawn]
    served = sorted({(t, m, base * x + a * unit, n * unit, w, x) for t, m, x, a, n, w in drawn})
    for some in (range(2), range(2, 4)):  # a turn is served whole
        now = [part for part in parts if part.turn[0] in some]
        if now:
            model.serve(Requests.together(now))
    for _, _, first, nbytes, write, tensor in served:
        plain.access("AB"[tensor], first, nbytes, write)
    dram, counts = plain.dram, model.counts
    for n, name in enumerate("AB"):
        assert SECTOR * counts.missed[n] == dram[name].read_bytes if name in dram else not counts.missed[n]
        assert SECTOR * counts.returned[n] == dram[name].write_bytes if name in dram else not counts.returned[n]
    asked = [sum(n * unit for _, _, x, _, n, w in drawn if (x, w) == (tensor, False)) for tensor in range(2)]
    assert counts.read_bytes.tolist() == asked


def lockstep(schedule: TileSchedule, slots: int, order: str = "rows") -> list[list[Access]]:
    """FlashAttention-2's requests, a list a turn, block by block."""
    p, Br, Bc = schedule.problem, schedule.block_rows, schedule.block_cols
    Tr, size = -(-p.seqlen_q // Br), p.itemsize
    axes = {
        "rows": [(b, h, i) for b in range(p.batch) for h in range(p.heads) for i in reversed(range(Tr))],
        "batch": [(b, h, i) for h in range(p.heads) for b in range(p.batch) for i in reversed(range(Tr))],
        "heads": [(b, h, i) for i in reversed(range(Tr)) for b in range(p.batch) for h in range(p.heads)],
    }
    bases, end = {}, 0
    heads = {"Q": p.heads, "K": p.kv_heads, "V": p.kv_heads, "O": p.heads, "L": p.heads}
    row = {"Q": p.head_dim * size, "K": p.head_dim * size, "V": p.head_dim_v * size, "O": p.head_dim_v * size, "L": 4}
    for name in row:
        length = p.seqlen_k if name in "KV" else p.seqlen_q
        bases[name], end = end, end + -(-p.batch * heads[name] * length * row[name] // 32768) * 32768

    def tile(name: str, batch: int, head: int, first: int, rows: int, write: bool = False) -> Access:
        length = p.seqlen_k if name in "KV" else p.seqlen_q
        return name, bases[name] + ((batch * heads[name] + head) * length + first) * row[name], rows * row[name], write

    def walk(batch: int, head: int, i: int) -> list[list[list[Access]]]:
        rows = min(Br, p.seqlen_q - i * Br)
        firsts, stops = p.keys_seen(np.array([i * Br, i * Br + rows - 1]), p.seqlen_k)
        first, stop = int(firsts[0]), int(stops[1])
        blocks = range(first // Bc, -(-stop // Bc)) if first < stop else range(0)
        group, steps = p.heads // p.kv_heads, []
        for j in reversed(blocks):
            cols = min(Bc, p.seqlen_k - j * Bc)
            steps.append([[], [tile("K", batch, head // group, j * Bc, cols)], [tile("V", batch, head // group, j * Bc, cols)], []])
        steps = steps or [[[], [], [], []]]
        if blocks:
            steps[0][0].append(tile("Q", batch, head, i * Br, rows))
        steps[-1][3].append(tile("O", batch, head, i * Br, rows, True))
        if schedule.lse:
            steps[-1][3].append(tile("L", batch, head, i * Br, rows, True))
        return steps

    waiting, running, turns = axes[order][::-1], [], []
    while waiting or running:
        while waiting and len(running) < slots:
            running.append(walk(*waiting.pop()))
        now = [each.pop(0) for each in running]
        running = [each for each in running if each]
        # Move by move, by address, the same of several blocks once
        turns.append(
            [access for move in range(4) for access in sorted({a for step in now for a in step[move]}, key=lambda a: a[1:])]
        )
    return turns


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    kv_heads, options = (
        draw(st.integers(1, 2)),
        draw(st.sampled_from([{}, {"causal": True}, {"window": (60, 5)}, {"window": (9, None)}])),
    )
    heads, n = kv_heads * draw(st.sampled_from([1, 1, 3])), st.integers(1, 400)
    dims = st.sampled_from([16, 24, 40, 64, 128])
    dtype = draw(st.sampled_from(["float16", "float32"]))
    Nq = draw(n)
    Nk = Nq if draw(st.booleans()) else draw(n)
    return Problem(draw(st.integers(1, 2)), heads, kv_heads, Nq, Nk, draw(dims), dtype, head_dim_v=draw(dims), **options)


@sweep(4, 40)
def test_random_forwards_are_those_of_a_plain_simulator(data: st.DataObject) -> None:
    """Few multiprocessors and a small cache, in every order of the grid; the requested bytes are theory's."""
    problem, order = data.draw(problems()), data.draw(st.sampled_from(l2.ORDERS))
    device = replace(A100, sm_count=data.draw(st.integers(1, 3)))
    schedule = plan(problem, device, "fa2", data.draw(st.sampled_from([None, (32, 32), (64, 16)])), lse=data.draw(st.booleans()))
    cache = data.draw(geometries.map(lambda made: replace(made, nbytes=8 * made.nbytes)))
    found, plain = l2.run(schedule, order=order, l2=cache), Plain(cache)
    for turn in lockstep(schedule, found.slots[0], order):
        for access in turn:
            plain.access(*access)
    assert found.dram == plain.dram
    assert found.asked == theory.traffic(schedule)


def test_what_fits_is_read_once() -> None:
    """Compulsory misses only, in every order: Q, K and V once from DRAM, O once to it."""
    problem = Problem(2, 8, 2, 512, 512, 64, "float16", causal=True)
    head = 512 * 64 * 2
    once = {"Q": (16 * head, 0), "K": (4 * head, 0), "V": (4 * head, 0), "O": (0, 16 * head)}
    for order in l2.ORDERS:
        found = l2.run(plan(problem, A100), order=order)
        assert found.dram == Traffic({name: TensorTraffic(*moved) for name, moved in once.items()})
        assert found.hit_rates["Q"] == 0
        assert found.hit_rates["K"] == 1 - once["K"][0] / found.asked["K"].read_bytes


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("d", [256, 320, 512])
def test_the_backward_of_wide_heads_asks_for_what_theory_counts(d: int, deterministic: bool) -> None:
    """A launch for each of dV and dK, and other thread blocks behind them."""
    schedule = plan_backward(Problem(1, 2, 1, 70, 60, d, "float16", causal=True), A100, deterministic=deterministic)
    found = l2.run(schedule)
    assert found.asked == theory.traffic(schedule)
    assert found.blocks == tuple(kernel.grid for kernel in schedule.kernels())


def test_the_backward_s_row_blocks_come_from_the_last_one_on() -> None:
    """The kernel has this order, and fetches the next lower one meanwhile; for each query head of the group in turn."""
    schedule = plan_backward(Problem(1, 2, 1, 512, 512, 64, "float16", causal=True), A100)
    memory = DeviceMemory()
    main = l2.launches_of(schedule, "rows", memory)[2]
    assert isinstance(main, PlayedWalk)
    first = main.requests(np.array([1]), np.array([0]), main.turns[1:2])
    of_q = [move.tensor.name for move in main.walk.moves].index("Q")
    rows = (first.first[first.move == of_q] - memory.bases["Q"]) // (schedule.block_rows * 128)
    blocks = 512 // schedule.block_rows
    seen = list(range(blocks - 1, schedule.block_cols // schedule.block_rows - 1, -1))
    assert rows.tolist() == [*seen, *(blocks + i for i in seen)]


@pytest.mark.parametrize("Bc", [32, 64])
def test_what_is_streamed_beyond_the_cache_has_no_reuse(Bc: int) -> None:
    """Each wave of row blocks reads K and V from DRAM again if those of a head are four times the cache."""
    N, d = 4096, 64
    device = replace(T4, sm_count=2)
    schedule = plan(Problem(1, 2, 2, N, N, d, "float16"), device, "fa2", (64, Bc))
    found = l2.run(schedule, l2=L2(2 * N * d * 2 // 4))
    waves, head = 2 * (N // 64) // found.slots[0], N * d * 2
    assert found.dram["K"].read_bytes == found.dram["V"].read_bytes == waves * head
    assert found.asked["K"].read_bytes == 2 * (N // 64) * head


@pytest.mark.wide
def test_heads_first_reads_more_where_their_keys_do_not_fit() -> None:
    """A wave of all heads streams all of K and V; row blocks of one head first read each of them about once."""
    problem = Problem(1, 16, 16, 16384, 16384, 128, "float16")
    schedule = plan(problem, A100)
    by_rows, by_heads = (l2.run(schedule, order=order) for order in ("rows", "heads"))
    assert by_rows.asked == by_heads.asked == theory.traffic(schedule)
    keys = 16 * 16384 * 128 * 2
    assert by_rows.dram["K"].read_bytes < 1.1 * keys
    assert 9 * keys < by_heads.dram["K"].read_bytes <= 10 * keys  # 9.5 waves


def documented() -> Iterator[tuple[Problem, str, list[float]]]:
    """The rows of docs/l2.md's table: a problem, a chip, GB of DRAM in each order of `l2.ORDERS`."""
    problem = None
    for cells in (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if re.match(r"\|( \d.*)? \| \S+", line)
    ):
        if cells[0]:
            batch, heads, kv_heads, N = re.fullmatch(r"(\d+) x (\d+)(?: \((\d+)\))?, ([\d,]+)", cells[0]).groups()  # type: ignore[union-attr]
            n = int(N.replace(",", ""))
            problem = Problem(int(batch), int(heads), int(kv_heads or heads), n, n, 128, "float16")
        assert problem is not None
        yield problem, cells[1], [float(cell) for cell in cells[4:7]]


ROWS = {f"{p.batch}x{p.heads}-{p.seqlen_q}-{chip}": (p, chip, told) for p, chip, told in documented()}
# The others take long
SHORT = ("1x16-4096-A100-40GB", "1x16-4096-H100-SXM", "1x16-4096-L4", "1x16-4096-T4", "1x16-16384-H100-SXM", "8x32-2048-A100-40GB")


@pytest.mark.parametrize("row", sample(SHORT, SHORT[:1]))
def test_the_page_s_table_is_what_the_model_says(row: str) -> None:
    problem, chip, told = ROWS[row]
    schedule = plan(problem, Device.named(chip), "fa2")
    assert [round(l2.run(schedule, order=order).dram.total_bytes / 1e9, 3) for order in l2.ORDERS] == told


def report(*options: str) -> dict[str, Any]:
    result = CliRunner().invoke(main, ["predict", "--l2", "--json", *options])
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)["l2"]  # type: ignore[no-any-return]


def test_predict_tells_it() -> None:
    told = report("--seqlen", "2048", "--head-dim", "64", "--heads", "4")
    found = l2.run(plan(Problem(1, 4, 4, 2048, 2048, 64, "float16"), A100))
    assert told["tensors"] == found.as_dict()["tensors"] and told["grid_orders"]["rows"] == found.dram.total_bytes
    text = CliRunner().invoke(main, ["predict", "--l2", "--seqlen", "2048", "--head-dim", "64", "--heads", "4"]).stdout
    decoded = report("--decode", "--seqlen-k", "512")
    assert (
        decoded["dram_bytes"]
        == l2.run(plan_decode(Problem(1, 32, 8, 1, 512, 128, "float16", causal=True, padded=True), A100)).dram.total_bytes
    )
    for row in told["tensors"].values():
        assert f"{row['dram_read_bytes']:,}" in text and f"{row['dram_write_bytes']:,}" in text


def test_sweep_tells_it_and_draws_it(tmp_path: Path) -> None:
    """The default is the kernel that runs, with the tile of long rows."""
    options = ("--over", "seqlen", "--heads", "2", "--from", "512", "--to", "2048", "--points", "3")
    result = CliRunner().invoke(main, ["sweep", "--l2", "--json", *options, "--plot", str(tmp_path / "l2.svg")])
    told = json.loads(result.stdout)
    assert result.exit_code == 0 and (told["algorithm"], told["tiling"]) == ("fa2", "fitted")
    for point in told["points"]:
        tile, N = (point["block_rows"], point["block_cols"]), point["seqlen"]
        found = l2.run(plan(Problem(1, 2, 2, N, N, 64, "float16"), A100, "fa2", tile))
        assert (point["dram_bytes"], point["l2_hit_rate"]) == (found.dram.total_bytes, found.hit_rate)
        assert point["total_bytes"] == found.asked.total_bytes
    assert "dram_bytes" not in json.loads(CliRunner().invoke(main, ["sweep", "--json", *options]).stdout)["points"][0]
    figure = draw(Problem(1, 2, 2, 4096, 4096, 64, "float16"), A100, "seqlen", [512, 2048], with_l2=True)
    (line,) = (line for line in figure.axes[0].lines if str(line.get_label()).startswith("FlashAttention-2 behind the L2"))
    assert np.asarray(line.get_ydata()).tolist() == [told["points"][0]["dram_bytes"], told["points"][2]["dram_bytes"]]
    table = CliRunner().invoke(main, ["sweep", "--l2", *options]).stdout
    assert "DRAM bytes" in table and f"{told['points'][1]['dram_bytes']:,}" in table


def test_what_no_kernel_runs_is_refused() -> None:
    options = ("--seqlen", "64", "--head-dim", "64", "--tiling", "paper", "--algorithm", "fa2")
    result = CliRunner().invoke(main, ["predict", "--l2", *options])
    assert result.exit_code == 2 and "blocks in steps of 16" in result.stderr and result.stderr.count("\n") == 1


def test_what_is_too_long_is_refused_and_skipped() -> None:
    options = ("--head-dim", "64", "--l2")
    result = CliRunner().invoke(main, ["predict", "--seqlen", "4000000", *options])
    assert result.exit_code == 2 and "plays at most 16,777,216 turns" in result.stderr
    result = CliRunner().invoke(main, ["sweep", "--over", "seqlen", "--from", "256", "--to", "4000000", "--points", "2", *options])
    assert result.exit_code == 0 and "skipped 1 of 2 points" in result.stderr


def test_wrong_arguments_are_named() -> None:
    schedule = plan(Problem(1, 1, 1, 64, 64, 64, "float16"), A100)
    with pytest.raises(ValueError, match="order"):
        l2.run(schedule, order="columns")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="l2 must be an L2"):
        l2.run(schedule, l2=4096)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nbytes = 100"):
        L2(100)
    with pytest.raises(ValueError, match="ways = 0"):
        L2(4096, 0)
    with pytest.raises(TypeError, match="nbytes must be an integer"):
        L2(4096.0)  # type: ignore[arg-type]
    fa3 = plan(Problem(1, 1, 1, 64, 64, 64, "float16"), H100, "fa3")
    with pytest.raises(ValueError, match="fa3 has an order of its own"):
        l2.run(fa3, order="heads")
