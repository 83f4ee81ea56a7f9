"""`cupyflash explain` and the choice of FlashAttention-2's tile: every candidate has its account, and what is said is what runs."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from click.testing import CliRunner, Result
from hypothesis import strategies as st

from cupyflash import Device, Problem, plan
from cupyflash.arrays import ITEMSIZE
from cupyflash.schedules import choose, fa2_backward_tiles, fa2_tiles, fa3_tiles, plan_backward
from cupyflash.schedules.fa2 import Fa2Schedule
from cupyflash.schedules.fa2_backward import Fa2BackwardSchedule
from cupyflash.sim import theory
from cupyflash.sim.cli import main
from cupyflash.sim.clock import sass
from cupyflash.tiling import DoesNotFit
from suites import sample, sweep

DEVICES = Device.catalogue()


def cupyflash(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["explain", *arguments])


def explained(*arguments: str) -> dict:
    result = cupyflash(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def problems() -> st.SearchStrategy[Problem]:
    lengths = st.sampled_from([1, 16, 100, 512, 4096, 16384])
    return st.builds(
        Problem,
        batch=st.sampled_from([1, 4]),
        heads=st.sampled_from([1, 8, 32]),
        kv_heads=st.just(1),
        seqlen_q=lengths,
        seqlen_k=lengths,
        head_dim=st.integers(1, 256),
        dtype=st.sampled_from(list(ITEMSIZE)),
        causal=st.booleans(),
        head_dim_v=st.none() | st.integers(1, 256),
        mask=st.booleans(),
        bias=st.booleans(),
    )


def able(problem: Problem, device: Device) -> bool:
    return problem.dtype != "bfloat16" or device.compute_capability >= (8, 0)


@sweep(15, 80, problem=problems(), device=st.sampled_from(DEVICES))
def test_the_choice_is_what_runs_and_nothing_else_is_faster(problem: Problem, device: Device) -> None:
    found = fa2_tiles.candidates(problem, device)
    best = found[0]
    schedule = plan(problem, device)
    assert isinstance(schedule, Fa2Schedule)
    assert (schedule.block_rows, schedule.block_cols) == (best.config.block_rows, best.config.block_cols)
    if able(problem, device):
        # Fixing the block sizes to the chosen ones changes nothing else.
        constants = dict(schedule.kernels()[-1].constants)
        assert constants["BLOCKS"] == best.config.blocks and constants["STAGES"] == best.config.stages
        assert schedule.candidate == best
    finalists = [each for each in found if each.clocks < math.inf]
    assert len({each.config.block_rows for each in finalists}) == len(finalists) <= len(fa2_tiles.BLOCK_ROWS)
    assert all(best.clocks <= each.clocks for each in finalists)


@sweep(10, 60, problem=problems(), device=st.sampled_from(DEVICES))
def test_every_configuration_is_a_candidate_once_with_a_rate_or_a_reason(problem: Problem, device: Device) -> None:
    found = fa2_tiles.candidates(problem, device)
    tiles = [(c.config.block_rows, c.config.block_cols, c.config.warp_rows, c.config.stages, c.config.q_in_regs) for c in found]
    assert len(set(tiles)) == len(tiles) == len(list(fa2_tiles.configs(problem, None)))
    for each in found:
        assert bool(each.rejected) != bool(each.rate > 0)
        if each.rejected:
            assert each.rejected.split(":")[0] in ("shared memory", "registers")
            continue
        assert each.shared_bytes <= device.sram_per_block
        assert each.config.blocks * each.shared_bytes <= device.sram_per_sm
        # What the blocks that share a multiprocessor are said to take is there.
        assert each.config.blocks * each.config.threads * each.registers <= device.registers_per_sm
        assert each.bound in dict(each.parts) and min(dict(each.parts).values()) >= 0


@sweep(5, 50, problem=problems(), device=st.sampled_from(DEVICES), n=st.integers(1, 20_000), heads=st.integers(1, 200))
def test_lengths_and_heads_choose_between_kernels_that_do_not_depend_on_them(
    problem: Problem, device: Device, n: int, heads: int
) -> None:
    other = Problem(
        1,
        heads,
        1,
        n,
        n,
        problem.head_dim,
        problem.dtype,
        head_dim_v=problem.head_dim_v,
        mask=problem.options.mask,
        bias=problem.options.bias,
        causal=problem.options.causal,
    )
    tiles = [{each.config for each in fa2_tiles.finalists(each, device)} for each in (problem, other)]
    assert tiles[0] == tiles[1]


@pytest.mark.parametrize("device", sample([device.name for device in DEVICES], {"T4", "RTX 5090"}))
@pytest.mark.parametrize("dtype", list(ITEMSIZE))
def test_every_head_dimension_runs_on_every_device(device: str, dtype: str) -> None:
    for d in range(8, 257, 8):
        for masked in (False, True):
            assert fa2_tiles.choose(Problem(1, 1, 1, 100, 100, d, dtype, mask=masked, bias=masked), Device.named(device)).rate > 0


def test_the_choices_of_a_kernel_engineer() -> None:
    """Long rows in 128 rows of 32 a warp and two blocks an SM; few and short ones in smaller blocks."""
    for name in ("A100-40GB", "H100-SXM"):
        for d in (64, 128):
            tile = fa2_tiles.choose(Problem(4, 16, 16, 4096, 4096, d, "float16"), Device.named(name)).config
            assert (tile.block_rows, tile.warp_rows, tile.blocks) == (128, 32, 2)
    one_query = fa2_tiles.choose(Problem(1, 1, 1, 1, 4096, 64, "float16"), Device.named("A100-40GB")).config
    assert one_query.block_rows == 16


def test_what_does_not_fit_is_told_with_bytes_and_device() -> None:
    with pytest.raises(DoesNotFit, match=r"needs at least .* bytes of SRAM .*T4"):
        fa2_tiles.choose(Problem(1, 1, 1, 16, 16, 256, "float32"), Device.named("T4", sram="8KB"))
    result = cupyflash("--head-dim", "256", "--sram", "4KB")
    assert result.exit_code == 2 and "bytes of SRAM" in result.output


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--causal", "--heads", "8", "--device", "H100-SXM", "--algorithm", "fa2"),
        ("--dtype", "float32", "--device", "T4"),
    ],
)
def test_json_holds_all_candidates_and_the_theory(options: tuple[str, ...]) -> None:
    report = explained("--seqlen", "1000", "--head-dim", "96", *options)
    device = Device.named(report["device"]["name"])
    problem = Problem(**report["problem"])
    found = fa2_tiles.candidates(problem, device)
    assert len(report["candidates"]) == len(found)
    for told, each in zip(report["candidates"], found, strict=True):
        assert {name: told[name] for name in ("block_rows", "block_cols", "warp_rows", "stages", "q_in_regs")} == {
            name: getattr(each.config, name) for name in ("block_rows", "block_cols", "warp_rows", "stages", "q_in_regs")
        }
        assert told.get("reason") == each.rejected and told.get("tile_clocks", {}) == dict(each.parts)
    assert [told["verdict"] for told in report["candidates"]].count("chosen") == 1
    assert report["candidates"][0]["verdict"] == "chosen"
    schedule = plan(problem, device)
    assert report["traffic"] == theory.traffic(schedule).as_dict() and report["flops"] == problem.flops


def test_block_sizes_that_are_asked_for_are_explained_alone() -> None:
    report = explained("--tiling", "64x32")
    assert {(each["block_rows"], each["block_cols"]) for each in report["candidates"]} == {(64, 32)}
    assert report["tiling"]["used"]["block_cols"] == 32
    refused = cupyflash("--tiling", "paper")
    assert refused.exit_code == 2 and "steps of 16" in refused.output  # Bc = 326 at d 64
    assert cupyflash("--algorithm", "fa1").exit_code == 2


def test_the_paper_s_tiling_is_beside_what_runs_and_said_to_be_another_algorithm_s() -> None:
    for options in ((), ("--tiling", "64x32")):
        shown = " ".join(cupyflash(*options).stdout.split())
        assert "runs FlashAttention-2 (fa2), whose tile is not the paper's Bc = ceil(M / 4d)" in shown
        assert "paper's formula Br 64 Bc 326" in shown and "fa1, fitted to its kernel Br 64 Bc 320" in shown
        assert ("fa2, used here Br 64 Bc 32 asked for" in shown) is bool(options)
    fitted = plan(Problem(1, 1, 1, 4096, 4096, 64, "float16"), Device.named("A100-40GB"), "fa1").tiling.used
    assert explained()["fa1_tiling"]["block_cols"] == fitted.block_cols == 320
    # Where Algorithm 1's kernel has no room FlashAttention-2's may have some.
    report = explained("--dtype", "float32", "--sram", "12800")
    assert report["fa1_tiling"] is None
    assert "nothing fits" in cupyflash("--dtype", "float32", "--sram", "12800").stdout


def test_one_warp_is_one_warp() -> None:
    shown = " ".join(cupyflash("--all").stdout.split())
    assert "1 warp of 16 rows" in shown and "1 warps" not in shown and " 1 blocks" not in shown


def test_text_names_finalists_reasons_and_that_it_is_a_model() -> None:
    asked = ("--head-dim", "128", "--device", "H100-SXM", "--algorithm", "fa2")
    text = cupyflash(*asked).stdout
    for word in (
        "Chosen:",
        "model",
        "Rejected (",
        "for registers",
        "HBM bytes by theory",
        "tensor",
        "exp",
        "issue",
        "L2",
        "tiling=(Br, Bc)",
    ):
        assert word in text, word
    everything = cupyflash(*asked, "--all").stdout
    found = fa2_tiles.candidates(Problem(1, 1, 1, 4096, 4096, 128, "float16"), Device.named("H100-SXM"))
    rejected = everything.split("Rejected (")[1].split("HBM bytes")[0]
    assert rejected.count(" stage") == sum(bool(each.rejected) for each in found)
    assert len(everything.splitlines()) > len(found)


# -- FlashAttention-3 ----------------------------------------------------------------------------------------------------

H100 = ("--device", "H100-SXM")
FA3 = ("--heads", "16", *H100)


def words(*arguments: str) -> str:
    """The output in one line."""
    result = cupyflash(*arguments)
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("options", "algorithm", "says"),
    [
        (FA3, "fa3", "By default attention runs FlashAttention-3 (fa3) here: by the models, "),
        (
            (*H100, "--seqlen", "16", "--head-dim", "8", "--causal"),
            "fa2",
            "runs FlashAttention-2 (fa2) here: by the models, ",
        ),
        ((*FA3, "--dtype", "float32"), "fa2", "fa3 does not run this: warpgroup products are of half types, and this is float32."),
        ((*FA3, "--mask", "--algorithm", "fa3"), "fa3", "which take the next from a queue"),
        ((*FA3, "--head-dim", "20"), "fa2", "TMA takes rows at multiples of 16 bytes, and here they are at multiples of 8."),
        ((*FA3, "--seqlen-k", "0"), "fa2", "TMA copies from tensors with elements, and one here has none."),
        ((*FA3, "--tiling", "64x32"), "fa2", "here: tiling= speaks of fa2's blocks."),
        (
            (*FA3, "--sram", "20KB"),
            "fa2",
            "fa3 at head_dim 64 does not fit H100-SXM with blocks of 128 x 16, the smallest: shared memory:",
        ),
        ((*FA3, "--algorithm", "fa2"), "fa2", "of fa2. Asked for is FlashAttention-2 (fa2)."),
        (
            (*H100, "--seqlen", "16", "--head-dim", "8", "--causal", "--algorithm", "fa3"),
            "fa3",
            "of fa3. Asked for is FlashAttention-3 (fa3).",
        ),
    ],
)
def test_on_a_hopper_it_is_told_which_kernel_runs_and_why_not_the_other(
    options: tuple[str, ...], algorithm: str, says: str
) -> None:
    report, shown = explained(*options), words(*options)
    assert report["algorithm"] == algorithm and says in shown
    assert report["auto"]["reason"] in shown
    assert ("runs " + {"fa2": "FlashAttention-2", "fa3": "FlashAttention-3"}[report["auto"]["algorithm"]]) in shown


def test_elsewhere_nothing_is_said_of_fa3_and_it_is_refused_in_one_line() -> None:
    for device in ("A100-40GB", "B200", "T4"):
        assert "fa3" not in words("--device", device)
        refused = cupyflash("--device", device, "--algorithm", "fa3")
        assert refused.exit_code == 2 and refused.stderr.count("\n") == 1
        assert "fa3 does not run this: warpgroup products are compute capability 9.0's" in refused.stderr


@sweep(15, 80, problem=problems(), tiling=st.sampled_from([None, (128, 64), (192, 48)]))
def test_fa3_s_candidates_are_tried_in_order_and_the_first_that_fits_is_what_runs(
    problem: Problem, tiling: tuple[int, int] | None
) -> None:
    device = Device.named("H100-SXM")
    if fa3_tiles.refusal(problem, device):
        with pytest.raises(ValueError, match=r"fa3 does not run this|algorithm 'fa3' has no place for"):
            plan(problem, device, "fa3")
        return
    found = fa3_tiles.candidates(problem, device, tiling)
    able = [each for each in found if not each.rejected]
    for each in found:
        _, widest = fa3_tiles.held_at_most(problem, each.config.team)
        held = each.registers <= each.most_registers and each.config.block_cols <= widest
        fits = held and each.shared_bytes <= device.sram_per_block
        assert bool(each.rejected) is not fits and bool(each.parts) is fits
        assert not each.rejected or each.rejected.split(":")[0] in ("registers", "shared memory")
        team = each.config.team
        assert sum(role["threads"] * role["registers"] for role in each.config.roles.values()) <= 65536
        assert team.launch_registers * team.threads <= 65536 < (team.launch_registers + 8) * team.threads
        if not each.rejected and not each.config.o_apart:  # O leaves through Q's room only where two slots leave it none
            needed = fa3_tiles.rooms(problem, replace(each.config, stages=2, o_apart=True))
            assert sum(needed.values()) > device.sram_per_block
    if not able:
        with pytest.raises(DoesNotFit, match="fa3 at head_dim"):
            plan(problem, device, "fa3", tiling)
        return
    schedule = plan(problem, device, "fa3", tiling)
    kernel = schedule.kernels()[-1]
    constants, best = dict(kernel.constants), able[0].config
    assert (constants["BR"], constants["BC"], constants["STAGES"]) == (best.team.block_rows, best.block_cols, best.stages)
    assert (constants["CONSUMER_REGISTERS"], constants["PRODUCER_REGISTERS"]) == best.registers
    assert kernel.shared_bytes == able[0].shared_bytes and kernel.threads == best.team.threads


@pytest.mark.parametrize("options", [(), ("--head-dim", "128", "--causal"), ("--head-dim", "256", "--window", "99,0")])
def test_fa3_s_json_is_what_is_planned(options: tuple[str, ...]) -> None:
    report = explained(*FA3, "--algorithm", "fa3", *options)
    device, problem = Device.named("H100-SXM"), Problem(**report["problem"])
    schedule = plan(problem, device, "fa3")
    kernel = schedule.kernels()[-1]
    (chosen,) = (each for each in report["candidates"] if each["verdict"] == "chosen")
    assert [each["verdict"] for each in report["candidates"]].index("chosen") == next(
        at for at, each in enumerate(report["candidates"]) if "reason" not in each
    )
    assert (chosen["block_rows"], chosen["block_cols"]) == (schedule.block_rows, schedule.block_cols)
    assert sum(report["rooms"].values()) == chosen["shared_bytes"] == kernel.shared_bytes
    assert sum(role["threads"] for role in report["roles"].values()) == kernel.threads
    assert report["grid"]["thread_blocks"] == kernel.grid
    assert report["grid"]["row_blocks"] == 16 * -(-4096 // schedule.block_rows)
    assert report["traffic"] == theory.traffic(schedule).as_dict()
    assert f"{report['clocks']:,.0f} clocks of fa3" in choose(problem, device).reason


def test_fa3_s_text_has_what_was_tried_rooms_roles_parts_and_grid() -> None:
    device, problem = Device.named("H100-SXM"), Problem(1, 16, 16, 4096, 4096, 192, "float16")
    found, schedule = fa3_tiles.candidates(problem, device), plan(problem, device, "fa3")
    at = next(at for at, each in enumerate(found) if not each.rejected)
    before, best, config = found[at - 1], found[at], found[at].config
    shown = words("--head-dim", "192", *FA3)

    def line(each: fa3_tiles.Fa3Candidate, verdict: str) -> str:
        sizes = f"{each.config.team.block_rows} x {each.config.block_cols}"
        return f"{sizes} {each.registers} of {each.most_registers} {each.shared_bytes:,} {verdict}"

    consumer, producer = config.registers
    for told in (
        line(before, "- rejected: shared memory"),
        line(best, f"{best.rate:.2f} chosen"),
        line(found[at + 1], f"{found[at + 1].rate:.2f} later"),
        f"and {len(found) - at - 2} more that would have come later (--all)",
        f"Q, which O leaves through {config.team.block_rows} x 192 {dict(best.rooms)['Q']:,}",
        f"K {config.stages} slots of {config.block_cols} x 192 {dict(best.rooms)['K']:,}",
        f"Registers: {config.team.launch_registers} a thread at launch",
        f"producer 128 {producer} {128 * producer:,} consumers 256 {consumer} {256 * consumer:,}",
        "Br x Bc tensor exp float32 issue scores a clock",
        f"{16 * schedule.row_blocks} row blocks of all heads on {device.sm_count} thread blocks",
        "8 heads at a time",  # of 3 MB each: a quarter of 50 MB has fewer, but fewer have not two row blocks for each of 132
        "addresses or strides that are no multiples of 16 bytes, which TMA does not take, are fa2's",
        "the paper's formula Br 152 Bc 152",
        "HBM bytes by theory",
    ):
        assert told in shown, told
    everything = words("--head-dim", "256", *FA3, "--all")
    assert "- rejected: registers" in everything and "Each warpgroup issues its products when it can" in everything
    assert "128 x 16 " in everything and "more that would" not in everything


# -- the backward --------------------------------------------------------------------------------------------------------


@sweep(15, 80, problem=problems(), device=st.sampled_from(DEVICES), deterministic=st.booleans())
def test_the_backward_runs_the_first_blocks_that_are_not_rejected(problem: Problem, device: Device, deterministic: bool) -> None:
    for tiling in (None, (64, 48)):
        found = [*fa2_backward_tiles.candidates(problem, device, tiling)]
        assert len({each.size for each in found}) == len(found)
        runs = [each for each in found if not each.rejected]
        for each in found:
            assert not each.rejected or each.rejected.split(":")[0] in ("shared memory", "registers")
            assert each.rejected or each.shared_bytes <= device.sram_per_block
        if not runs:
            with pytest.raises(DoesNotFit, match="fa2's backward at head_dim"):
                plan_backward(problem, device, "fa2", tiling)
            continue
        schedule = plan_backward(problem, device, "fa2", tiling, deterministic=deterministic)
        assert isinstance(schedule, Fa2BackwardSchedule)
        assert runs[0].size == (schedule.block_rows, schedule.block_cols)
        assert (runs[0].warps, runs[0].stages) == (schedule.warps, schedule.stages)
        if deterministic and tiling is None:
            taken = next(each for each in fa2_backward_tiles.query_candidates(problem, device) if not each.rejected)
            assert taken.size == (schedule.by_rows.block_rows, schedule.by_rows.block_cols)


@pytest.mark.parametrize(
    "options", [("--deterministic",), ("--head-dim", "160", "--device", "T4"), ("--head-dim", "512", "--deterministic")]
)
def test_the_backward_s_json_is_what_is_planned(options: tuple[str, ...]) -> None:
    report = explained("--backward", *options)
    posed, own = Problem(**report["problem"]), "--deterministic" in options
    schedule = plan_backward(posed, Device.named(report["device"]["name"]), deterministic=own)
    assert isinstance(schedule, Fa2BackwardSchedule)
    (chosen,) = (each for each in report["candidates"] if each["verdict"] == "chosen")
    assert [each["verdict"] for each in report["candidates"]].index("chosen") == next(
        at for at, each in enumerate(report["candidates"]) if "reason" not in each
    )
    main = [kernel for kernel in schedule.kernels() if kernel.name == "fa2_backward"]
    assert len(main) == len(report["launches"])
    assert chosen["shared_bytes"] == sum(report["rooms"].values()) == main[0].shared_bytes
    assert chosen["warps"] * 32 == main[0].threads
    if own:
        (taken,) = (each for each in report["query_candidates"] if each["verdict"] == "chosen")
        (kernel,) = (kernel for kernel in schedule.kernels() if kernel.name == "fa2_backward_queries")
        assert (taken["shared_bytes"], taken["warps"] * 32) == (kernel.shared_bytes, kernel.threads)
    form = theory.traffic(schedule)
    assert report["traffic"] == form.as_dict() and chosen["hbm_bytes"] == form.total_bytes
    way = report["ways"]["deterministic" if own else "atomics"]
    assert (way["read_bytes"], way["write_bytes"]) == (form.read_bytes, form.write_bytes)
    assert way["kernels"] == [kernel.name for kernel in schedule.kernels()]


@pytest.mark.wide
@pytest.mark.skipif(sass.disassembler() is None, reason="needs NVIDIA's disassemblers")
@pytest.mark.parametrize("backward", [("--backward",), ()])
def test_the_clock_s_time_and_lines_stand_beside_an_explanation(backward: tuple[str, ...]) -> None:
    options = (
        *backward,
        "--seqlen",
        "512",
        "--head-dim",
        "64",
        "--heads",
        "2",
        "--device",
        "H100-SXM",
        "--algorithm",
        "fa3",
        "--time",
    )
    time = explained(*options)["time"]
    names = [each["kernel"] for each in time["launches"]]
    assert time["source"] == "clock" and ("fa3_backward" in names) == bool(backward) and time["seconds"] > 0
    assert sum(line["share"] for line in time["lines"]) == pytest.approx(1)
    own = [line for line in time["lines"] if line["file"].endswith("fa3_backward.cu" if backward else "fa3_forward.cu")]
    assert own and all(line["text"] for line in own[:5])
    assert "warps wait for" in cupyflash(*options).stdout
    assert "predict --decode --time" in cupyflash("--decode", "--time").output


def test_the_backward_s_clocks_are_those_of_its_products() -> None:
    """docs/performance.md counts as many from an execution: 64 x 128 at d 64 on an A100, five products, an exponential a score."""
    (chosen,) = (each for each in explained("--backward")["candidates"] if each["verdict"] == "chosen")
    assert (chosen["block_rows"], chosen["block_cols"]) == (64, 128)
    assert chosen["tile_clocks"]["tensor"] == 2560 and chosen["tile_clocks"]["exp"] == 512


def test_the_backward_s_text_has_what_was_tried_and_both_ways_to_dq() -> None:
    shown = words("--backward", "--dtype", "float32", "--device", "RTX 4090")
    for told in (
        "Algorithm 4",
        "Tried, in this order",
        "rejected: shared memory",
        "2 for shared memory, as 64 x 128: shared memory: 131,840 of 101,376 bytes",
        "Chosen: 32 x 128, 8 warps",
        "by atomics",
        "Here with atomics (--deterministic is the other way)",
        "HBM bytes by theory",
    ):
        assert told in shown, told
    everything = words("--backward", "--deterministic", "--head-dim", "512", "--device", "T4", "--all")
    assert everything.count("rejected: shared memory") == 38 and "more, rejected" not in everything
    assert "dQ has a kernel of its own" in everything and "dV in a launch of its own, then dK" in everything


def test_the_backward_that_a_hopper_runs_is_explained() -> None:
    """By default, with both orders of dQ's sum; what it does not run is said, with the blocks of what does."""
    hopper = "--backward", "--device", "H100-SXM", "--head-dim", "128"
    report = explained(*hopper, "--heads", "16", "--causal")
    problem, device = Problem(**report["problem"]), Device.named("H100-SXM")
    assert report["auto"]["algorithm"] == report["algorithm"] == "fa3" and not report["deterministic"]
    for name, deterministic in (("in any order", False), ("deterministic", True)):
        schedule = plan_backward(problem, device, "fa3", deterministic=deterministic)
        form = theory.traffic(schedule)
        assert (report["ways"][name]["read_bytes"], report["ways"][name]["write_bytes"]) == (form.read_bytes, form.write_bytes)
        assert report["ways"][name]["kernels"] == [kernel.name for kernel in schedule.kernels()]
        (main,) = (kernel for kernel in schedule.kernels() if kernel.name == "fa3_backward")
        assert sum(report["rooms"].values()) == main.shared_bytes and report["grid"]["thread_blocks"] == main.grid
    shown = words(*hopper)
    for told in ("By default attention_backward runs FlashAttention-3's backward (fa3)", "64 x 128: 256 consumer threads of 240"):
        assert told in shown, told
    assert "the kernel takes a bias beside masks, a score function or dropout" in words(*hopper, "--score", "2 * s", "--bias")
    assert "64 keys, of whose gradients each of 2 consumer warpgroups has half of the columns" in words(
        *hopper[:3], "--head-dim", "256"
    )
    assert "Asked for is FlashAttention-2 (fa2)" in words(*hopper, "--algorithm", "fa2")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--algorithm", "decode"), "--backward explains fa2 and fa3, got 'decode'"),
        (("--algorithm", "fa3"), "compute capability 9.0's, and A100-40GB has 8.0"),
        (("--decode",), "--backward cannot go with --decode"),
        (("--sram", "1KB"), "fa2's backward at head_dim 64 float16 needs at least"),
    ],
)
def test_what_of_the_backward_cannot_be_explained_is_refused_in_one_line(options: tuple[str, ...], says: str) -> None:
    refused = cupyflash("--backward", *options)
    assert refused.exit_code == 2 and refused.stderr.count("\n") == 1 and says in refused.stderr
