"""`cupyflash explain` and the choice of FlashAttention-2's tile: every candidate has its account, and what is said is what runs."""

from __future__ import annotations

import json
import math

import pytest
from click.testing import CliRunner, Result
from hypothesis import strategies as st

from cupyflash import Device, Problem, plan
from cupyflash.arrays import ITEMSIZE
from cupyflash.schedules import fa2_tiles
from cupyflash.schedules.fa2 import Fa2Schedule
from cupyflash.sim import theory
from cupyflash.sim.cli import main
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
        constants = dict(schedule.kernels()[0].constants)
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


@pytest.mark.parametrize("device", sample([device.name for device in DEVICES], {"T4", "A100-40GB", "RTX 5090"}))
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
