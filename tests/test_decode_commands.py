"""Decoding through the commands, `explain`, `predict`, `verify` and `sweep`, and the reference that they measure with."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from cupyflash import Device, Problem, plan
from cupyflash import sim as public
from cupyflash.schedules import Cache, decode_tiles, plan_decode
from cupyflash.sim import replay, theory, verification
from cupyflash.sim.cli import main
from cupyflash.sim.cli.explain_decode import least_splits
from cupyflash.sim.numbers.inputs import Decoding
from cupyflash.sim.numbers.reference import reference, reference_decode
from cupyflash.sim.numbers.yardstick import draw_decode, measure_decode
from cupyflash.sim.pictures.plot import draw_cache
from cupyflash.sim.pictures.sweep_decode import sweep_cache
from suites import wide

H100 = Device.named("H100-SXM")
ON_H100 = ("--device", "H100-SXM")


def run(command: str, *options: str) -> Result:
    return CliRunner().invoke(main, [*command.split(), *options])


def report(command: str, *options: str) -> dict[str, Any]:
    result = run(command, *options, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def words(command: str, *options: str) -> str:
    result = run(command, *options)
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())


def problem(batch: int = 1, heads: int = 32, kv_heads: int = 8, n_q: int = 1, keys: int = 8192, **asked: Any) -> Problem:
    dtype, d = asked.pop("dtype", "float16"), asked.pop("d", 128)
    return Problem(batch, heads, kv_heads, n_q, keys, d, dtype, padded=True, **{"causal": True, **asked})


# -- explain ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [(), ("--batch", "64"), ("--heads", "4", "--kv-heads", "1", "--seqlen-k", "512"), ("--seqlen", "64", "--num-splits", "3")],
)
def test_what_is_explained_is_what_is_planned(options: tuple[str, ...]) -> None:
    found = report("explain --decode", *options, *ON_H100)
    posed = Problem(**found["problem"])
    schedule = plan_decode(posed, H100, num_splits=found["num_splits"])
    config = schedule.config
    (best,) = (each for each in found["candidates"] if each["verdict"] == "chosen")
    assert len(found["candidates"]) == len(decode_tiles.BLOCK_COLS) * len(decode_tiles.STAGES)
    assert (best["splits"], best["thread_blocks"]) == (schedule.splits, schedule.grid)
    assert (best["block_cols"], best["stages"], best["row_warps"], best["key_warps"]) == (
        *(config.block_cols, config.stages),
        *(config.row_warps, config.key_warps),
    )
    assert sum(found["rooms"].values()) == best["shared_bytes"] == schedule.kernels()[0].shared_bytes
    rows = found["rows"]
    assert rows["rows"] == rows["group"] * rows["queries"] == schedule.rows and rows["row_tiles"] == schedule.row_tiles
    (taken,) = (each for each in found["splits"] if each["chosen"])
    assert taken["seconds"] == best["seconds"] and taken["thread_blocks"] == schedule.grid
    for each in found["splits"]:
        parts = each["parts"]
        longest = max(parts["memory"], parts["loads"], parts["arithmetic"])
        assert each["seconds"] == pytest.approx(longest + parts["start"] + parts["partial"])
        assert each["seconds"] >= taken["seconds"] or "--num-splits" in options or each["thread_blocks"] < H100.sm_count
    assert found["traffic"] == theory.traffic(schedule).as_dict()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("batch", [1, 2, 16, 128])
def test_an_h100_has_forty_kilobytes_under_way_where_the_cache_is_long_enough(batch: int, dtype: str) -> None:
    needed = decode_tiles.needed_in_flight(H100)
    assert needed > 40_000
    long = 0
    for (heads, kv_heads), keys, d in [((32, 8), 8192, 128), ((32, 32), 1024, 64), ((8, 1), 65536, 128), ((16, 2), 4096, 80)]:
        posed = problem(batch, heads, kv_heads, 1, keys, dtype=dtype, d=d)
        if batch * kv_heads * keys * decode_tiles.key_bytes(posed) > 4 * needed * H100.sm_count:
            assert decode_tiles.under_way(posed, H100, decode_tiles.choose(posed, H100)) >= needed, posed
            long += 1
    assert long


def test_thread_blocks_are_as_many_as_multiprocessors_where_the_cache_allows_it_or_it_says_why_not() -> None:
    for heads, kv_heads, keys in ((32, 8, 8192), (4, 1, 4096), (4, 1, 512), (1, 1, 16), (32, 8, 256)):
        options = ("--heads", str(heads), "--kv-heads", str(kv_heads), "--seqlen-k", str(keys))
        found = report("explain --decode", *options, *ON_H100)
        (blocks,) = (each["thread_blocks"] for each in found["candidates"] if each["verdict"] == "chosen")
        notes = " ".join(found["notes"])
        enough = kv_heads * keys // 16 >= H100.sm_count
        assert (blocks >= H100.sm_count) == enough == ("thread blocks for 132" not in notes and "1 thread block for" not in notes)
    assert "512 keys are 32 blocks of 16, of which a split has at least one, and there is 1 key head" in words(
        "explain --decode --heads 4 --kv-heads 1 --seqlen-k 512", *ON_H100
    )
    asked = words("explain --decode --num-splits 3", *ON_H100)
    assert (
        "since there are 3 splits of each (they are asked for) and there are 8 key heads" in asked
        and "Splits: 3 (asked for)" in asked
    )


def test_the_text_says_what_rows_are_and_how_often_a_key_head_is_read() -> None:
    once = words("explain --decode", *ON_H100)
    assert "what a function reads once a head" in words("explain --decode --alibi", *ON_H100)
    assert "4 query heads x 1 query = 4 rows, which go together in one tile of 16: K and V are read once for all of them" in once
    for told in ("none is measured", "Little's law", "40,634 bytes a multiprocessor", "That is enough", "waves"):
        assert told in once
    twice = words("explain --decode --seqlen 100", *ON_H100)
    assert "A key head is read 2 times: it has 400 rows (4 query heads x 100 queries), and a tile 256 at most." in twice
    short = words("explain --decode --heads 4 --kv-heads 1 --seqlen-k 512", *ON_H100)
    assert "for the cache is short: all of its K and V are 262,144 bytes, 8,192 for each multiprocessor in use" in short
    some = report("explain --decode --cache-seqlens 500", *ON_H100)
    assert any("have keys to read, by lengths and window" in note for note in some["notes"])
    tried = run("explain --decode --sram 40KB --seqlen 16 --all").stdout
    assert "rejected for shared memory" in " ".join(tried.split())


@pytest.mark.parametrize("queries", [1, 16, 64])
def test_idle_multiprocessors_are_worth_a_tenth_of_the_time_and_no_more(queries: int) -> None:
    """By the model, however many splits; of 64 queries fewer thread blocks than multiprocessors had been two times as fast."""
    idle = 0
    for heads, keys in ((8, 8192), (8, 512), (64, 512), (1, 4096)):
        posed = problem(1, 4 * heads, heads, queries, keys)
        best = decode_tiles.choose(posed, H100)
        each = [decode_tiles.candidates(posed, H100, splits) for splits in range(1, min(256, keys // 16) + 1)]
        fastest = min(
            one.seconds for some in each for one in some if not one.rejected and one.splits <= keys // one.config.block_cols
        )
        assert (1 - decode_tiles.WORTH) * best.seconds <= (1 + decode_tiles.NOISE) * fastest
        if (blocks := decode_tiles.works(posed, best.config) * best.splits) < H100.sm_count:
            text = words(f"explain --decode --heads {4 * heads} --kv-heads {heads} --seqlen {queries} --seqlen-k {keys}", *ON_H100)
            assert f"{blocks} thread blocks for 132 multiprocessors, since" in text
            idle += "more would be slower by the model" in text
    assert idle or queries == 1


def test_splits_are_the_least_that_give_each_multiprocessor_a_thread_block_or_more() -> None:
    schedule = plan_decode(problem(), H100)
    assert least_splits(schedule) == 17 <= schedule.splits


ORDINARY = ("--seqlen", "1", "--seqlen-k", "8192", "--heads", "8", "--head-dim", "64")


def test_an_ordinary_call_whose_keys_are_split_is_explained_and_predicted_too() -> None:
    found = report("explain", *ORDINARY)
    assert found["algorithm"] == found["auto"]["algorithm"] == "decode" and "cache" not in found
    text = words("explain", *ORDINARY)
    assert "By default attention(q, k, v) runs Flash-Decoding (decode) here: by the models" in text
    assert "only the device may know" not in text and "--decode" not in text
    other = words("explain --algorithm decode --seqlen 512")
    assert "By default attention(q, k, v) runs FlashAttention-2 (fa2) here" in other
    assert "Asked for is Flash-Decoding (decode)" in other
    predicted = report("predict", *ORDINARY)
    schedule = plan(Problem(**predicted["problem"]), Device.named("A100-40GB"), "decode")
    assert predicted["traffic"] == theory.traffic(schedule).as_dict() and predicted["replay_agrees"] is True
    assert next(iter(predicted["algorithms"])) == "decode"
    assert predicted["algorithms"]["decode"]["total_bytes"] == sum(predicted["traffic"]["total"].values())


# -- predict ------------------------------------------------------------------------------------------------------------

PAGED = ("--batch", "2", "--cache-seqlens", "8000,100", "--page-size", "16", "--append", "2", "--tree", "--seqlen", "4")


@pytest.mark.parametrize("options", [(), PAGED, ("--window", "1000,0", "--lse"), ("--seqlen", "100", "--no-causal")])
def test_predict_is_the_theory_and_the_replay(options: tuple[str, ...]) -> None:
    found = report("predict --decode", *options, *ON_H100)
    assert found["problem"]["causal"] is ("--no-causal" not in options and "--window" not in options)
    schedule = plan_decode(Problem(**found["problem"]), H100, Cache(**found["cache"]), lse="--lse" in options)
    assert found["traffic"] == theory.traffic(schedule).as_dict() == replay(schedule).as_dict()
    assert found["replay_agrees"] is True and found["peak_sram_bytes"] == schedule.kernels()[0].shared_bytes
    assert found["splits"] == schedule.splits and found["extra_memory_bytes"] == schedule.workspace_bytes
    moved, apart = found["traffic"], found["apart"]
    parts = sum(sum(moved[name].values()) for name in ("O_part", "m_part", "l_part"))
    total = sum(moved["total"].values())
    assert apart["partial_results"] == {"bytes": parts, "share": parts / total} and parts > 0
    pages = sum(moved.get("block_table", {"read_bytes": 0}).values())
    assert apart["pages"] == {"bytes": pages, "share": pages / total} and (pages > 0) == ("--page-size" in options)
    assert found["hbm_seconds"] == total / H100.hbm_bandwidth


def test_k_and_v_are_read_once_a_key_head_and_fa2_reads_them_for_each_query_head() -> None:
    found = report("predict --decode --cache-seqlens 8000,100 --batch 2 --append 2", *ON_H100)
    once = 8 * (8000 + 100 + 4) * 2 * 128 * 2
    assert found["keys"] == {"once_bytes": once, "read_bytes": once}
    beside = found["beside"]
    assert beside["decode"]["key_bytes"] == once and beside["fa2"]["key_bytes"] == 4 * once
    calls = [plan(Problem(1, 32, 8, 1, keys, 128, "float16", causal=True), H100) for keys in (8002, 102)]
    assert beside["fa2"]["total_bytes"] == sum(theory.traffic(call).total_bytes for call in calls)
    text, model = words("predict --decode", *ON_H100), report("predict --decode", *ON_H100)["hbm_seconds"]
    assert "each row once a key head, not once for each of its 4 query heads" in text
    assert f"a model: {model * 1e6:.2f} us, all bytes at 3,352 GB/s" in text and "4 query heads share a key head here" in text
    assert "It takes no pages" in words("predict --decode --page-size 16", *ON_H100)


def test_a_key_head_that_several_tiles_read_and_a_window_s_blocks_are_told() -> None:
    tiles = report("predict --decode --seqlen 100", *ON_H100)["keys"]
    assert 1.9 < tiles["read_bytes"] / tiles["once_bytes"] <= 2
    assert "2 tiles of 256 at most, which each read the keys that their rows see" in words(
        "predict --decode --seqlen 100", *ON_H100
    )
    window = report("predict --decode --window 100,0", *ON_H100)["keys"]
    assert window["once_bytes"] == 101 * 8 * 512 < window["read_bytes"] <= (101 + 63) * 8 * 512
    assert "the rest of the blocks that a window begins or ends in" in words("predict --decode --window 100,0", *ON_H100)
    assert "there are no keys" in words("predict --decode --seqlen-k 0")


def test_what_is_new_counts_once_though_no_query_sees_it() -> None:
    """A window of one key and five new ones: four new keys are read, to be put in their places, and one is seen."""
    schedule = plan_decode(problem(keys=64, key_lengths=(50,), window=(0, 0)), H100, Cache(appended=5))
    assert theory.key_bytes(schedule) == 5 * 8 * 512
    bounded = plan_decode(problem(n_q=2, keys=64, key_lengths=(50,), window=(3, 0)), H100, Cache())
    assert theory.key_bytes(bounded) == 5 * 8 * 512


# -- verify -------------------------------------------------------------------------------------------------------------

EXECUTED = "verify --decode --seqlen-k 64 --page-size 16 --append 1 --cache-seqlens 47,6 --lse --num-splits 2 --head-dim 16"


def test_verify_executes_pages_in_random_order_and_compares_the_caches() -> None:
    pytest.importorskip("cupy")
    found = report(EXECUTED)
    assert found["good"] and found["findings"] == found["caches"] == found["differences"] == [] and found["splits"] == 2
    assert found["traffic"]["theory"] == found["traffic"]["replay"] == found["traffic"]["executed"]
    assert [(row["v_mean"], row["tensor"]) for row in found["numbers"]] == [(0, "O"), (0, "L"), (1, "O"), (1, "L")]
    assert all(0 < row["error"] <= row["allowed"] for row in found["numbers"])
    moved = found["traffic"]["executed"]
    assert moved["K"] == {"read_bytes": 2 * (47 + 6) * 32, "write_bytes": 2 * 2 * 32} and moved["block_table"]["read_bytes"] > 0


@pytest.mark.parametrize(
    ("spoiled", "says"), [("out", "further off than allowed in O"), ("k_cache", "caches"), wide("v_cache", "caches")]
)
def test_wrong_numbers_and_wrong_caches_fail(monkeypatch: pytest.MonkeyPatch, spoiled: str, says: str) -> None:
    pytest.importorskip("cupy")
    right = verification.execute_decode

    def worse(schedule: Any, **arrays: Any) -> Any:
        execution = right(schedule, **arrays)
        if spoiled == "out":
            return replace(execution, out=execution.out * np.float16(1.1))
        places = arrays[spoiled].view(np.uint16)
        places[arrays["block_table"][0, 2], 1, 15, 3] ^= 1  # the last bit of one element of the new row
        return execution

    monkeypatch.setattr(verification, "execute_decode", worse)
    result = run(EXECUTED)
    assert result.exit_code == 1 and says in result.stderr and "theory == replay" not in result.stdout
    if spoiled != "out":
        assert f"{spoiled}: 1 element" in " ".join(result.stdout.split())


def test_lengths_that_a_schedule_does_not_know_are_full_ones() -> None:
    pytest.importorskip("cupy")
    schedule = plan_decode(problem(2, 4, 2, 1, 64, d=16), Device.named("A100-40GB"), Cache(1, 16, 8), num_splits=2, lse=True)
    found = verification.verify(schedule)
    assert found.good and found.theory == theory.traffic(schedule)


@pytest.mark.wide
def test_the_text_says_that_all_holds() -> None:
    pytest.importorskip("cupy")
    text = words(EXECUTED)
    assert "the caches are, bit for bit, as they should be" in text and "the keys of a sequence in 2 splits" in text


@pytest.mark.wide
def test_verify_executes_an_ordinary_call_whose_keys_are_split() -> None:
    pytest.importorskip("cupy")
    found = report("verify --algorithm decode --seqlen 2 --seqlen-k 100 --head-dim 16")
    assert found["good"] and found["traffic"]["theory"] == found["traffic"]["replay"] == found["traffic"]["executed"]
    assert "cache_seqlens" not in found["traffic"]["theory"] and "caches" not in found


@pytest.mark.wide
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--seqlen", "4", "--tree", "--softcap", "2", "--page-size", "32", "--append", "4", "--cache-seqlens", "1,99", "--lse"),
        ("--sinks", "--num-splits", "1", "--window", "30,0", "--dtype", "float32", "--seqlen-k", "96", "--lse"),
        ("--seed", "3", "--seqlen-k", "64", "--dtype", "bfloat16"),
        ("--seqlen", "70", "--no-causal", "--append", "70", "--seqlen-k", "100", "--cache-seqlens", "0"),
    ],
)
def test_verify_executes_what_decoding_has(options: tuple[str, ...]) -> None:
    pytest.importorskip("cupy")
    found = report("verify --decode", *options)
    assert found["good"] and found["traffic"]["theory"] == found["traffic"]["replay"] == found["traffic"]["executed"]


# -- the reference ------------------------------------------------------------------------------------------------------


def drawn(posed: Problem, cache: Cache) -> Decoding:
    return draw_decode(posed, cache, seed=3, v_mean=1.0)


def test_the_reference_is_attention_over_each_sequence_with_its_new_keys() -> None:
    posed = problem(2, 4, 2, 3, 64, d=8, dtype="float32", key_lengths=(40, 5), window=(9, 0))
    decoding = drawn(posed, Cache(appended=2, page_size=16, pages=5))
    out, lse = reference_decode(**decoding.arrays, window=(9, 0))
    given = decoding.arrays
    for b, length in enumerate((40, 5)):
        keys, values = (
            np.stack([given[cache][given["block_table"][b, key // 16], :, key % 16] for key in range(length)], axis=1)
            for cache in ("k_cache", "v_cache")
        )
        k, v = np.concatenate([keys, given["k"][b]], axis=1), np.concatenate([values, given["v"][b]], axis=1)
        expected = reference(given["q"][b], k, v, causal=True, window=(9, 0))
        np.testing.assert_array_equal(out[b], expected[0])
        np.testing.assert_array_equal(lse[b], expected[1])


def test_a_tree_mask_is_over_the_newest_keys_and_scores_are_capped_before_it() -> None:
    posed = problem(2, 2, 1, 3, 32, d=8, dtype="float32", key_lengths=(20, 2))
    given = drawn(posed, Cache(tree=True)).arrays
    out, lse = reference_decode(**given, softcap=1.5)
    for b, length in enumerate((20, 2)):
        for head in range(2):
            for i in range(3):
                q = given["q"][b, head, i].astype(np.float64)
                own = i + length - 3
                seen = [c for c in range(length) if c <= own and (c < length - 3 or given["tree_mask"][b, i, c - (length - 3)])]
                K, V = (given[name][b, 0, seen].astype(np.float64) for name in ("k_cache", "v_cache"))
                s = 1.5 * np.tanh(K @ q / np.sqrt(8) / 1.5)
                weights = np.exp(s)
                assert lse[b, head, i] == pytest.approx(np.log(weights.sum()) if seen else -np.inf, rel=1e-12)
                expected = weights @ V / weights.sum() if seen else np.zeros(8)
                np.testing.assert_allclose(out[b, head, i], expected, rtol=1e-12, atol=1e-14)
    assert np.isneginf(lse[1, 0, 0])  # the first of three queries has its place before the first of two keys


def test_what_is_drawn_is_nan_wherever_no_sequence_has_a_key() -> None:
    posed = problem(2, 2, 1, 1, 64, d=4, key_lengths=(40, 5))
    decoding = drawn(posed, Cache(appended=3, page_size=16, pages=9))
    table, cache = decoding.arrays["block_table"], decoding.arrays["k_cache"]
    assert [sorted(set(row.tolist()) - {-1}) for row in table] != [[0, 1, 2], [3]] and (table[:, 3:] == -1).all()
    assert len(set(table[table >= 0].tolist())) == 4
    assert int((~np.isnan(cache)).sum()) == 4 * (40 + 5)
    after = decoding.appended("k_cache")
    assert int((~np.isnan(after)).sum()) == 4 * (40 + 5 + 6)
    np.testing.assert_array_equal(after[table[0, 2], :, 8:11], decoding.arrays["k"][0])
    with pytest.raises(ValueError, match="pages must be at least 4"):
        draw_decode(posed, Cache(appended=3, page_size=16, pages=3))


def test_one_wrong_sequence_among_many_is_measured() -> None:
    decoding = drawn(problem(4, 2, 1, 1, 32, d=8), Cache())
    exact = [reference(*inputs.qkv, causal=True) for inputs in decoding.sequences]
    out, lse = (
        np.concatenate(each).astype(kind) for each, kind in zip(zip(*exact, strict=True), ("float16", "float32"), strict=True)
    )
    assert all(numbers.good for numbers in measure_decode(out, lse, decoding.sequences).values())
    out[2] *= np.float16(1.05)
    numbers = measure_decode(out, lse, decoding.sequences)
    assert not numbers["O"].good and numbers["L"].good
    out[1, 0, 0, 0] = np.nan
    assert measure_decode(out, None, decoding.sequences)["O"].error == np.inf


def test_a_user_finds_what_decoding_needs() -> None:
    assert {"execute_decode", "replay", "theory"} <= set(public.__all__) and callable(public.execute_decode)


# -- sweep --------------------------------------------------------------------------------------------------------------


def test_a_sweep_is_the_theory_s_at_every_length() -> None:
    found = report("sweep --over cache --batch 2 --page-size 48 --append 1 --from 1000 --to 9000 --points 3", *ON_H100)
    assert found["over"] == "cache" and found["problem"]["seqlen_k"] is None and found["problem"]["heads"] == 32
    assert [point["cache"] for point in found["points"]] == [1008, 3024, 9024]  # whole pages
    for point in found["points"]:
        keys = point["cache"]
        schedule = plan_decode(problem(2, keys=keys), H100, Cache(1, 48, 2 * keys // 48))
        traffic = theory.traffic(schedule)
        assert (point["read_bytes"], point["write_bytes"]) == (traffic.read_bytes, traffic.write_bytes)
        assert (point["splits"], point["thread_blocks"]) == (schedule.splits, schedule.grid)
        parts = sum(traffic[name].total_bytes for name in ("O_part", "m_part", "l_part"))
        assert point["partial_share"] == parts / traffic.total_bytes and point["page_bytes"] == traffic["block_table"].read_bytes
        fa2 = theory.traffic(plan(Problem(2, 32, 8, 1, keys, 128, "float16", causal=True), H100))
        assert point["fa2_bytes"] == fa2.total_bytes and point["fa2_ratio"] == fa2.total_bytes / traffic.total_bytes


def test_csv_and_table_show_what_json_says(tmp_path: Path) -> None:
    options = ("--from", "1024", "--to", "4096", "--points", "3", *ON_H100)
    points = report("sweep --over cache", *options)["points"]
    assert report("sweep --decode --over cache", *options)["points"] == points
    rows = list(csv.DictReader(io.StringIO(run("sweep --over cache --format csv", *options).stdout)))
    assert [{name: float(value) for name, value in row.items()} for row in rows] == points
    shown = run("sweep --over cache", *options).stdout
    for point in points:
        assert f"{point['cache']:,}" in shown and f"{point['total_bytes']:,}" in shown and f"{point['partial_share']:.2%}" in shown
    written = run("sweep --over cache --output", str(tmp_path / "a.csv"), "--format", "csv", *options)
    assert written.exit_code == 0 and (tmp_path / "a.csv").read_text().count("\n") == 4


def test_the_picture_has_decoding_its_parts_and_fa2() -> None:
    pytest.importorskip("matplotlib")
    points = sweep_cache(problem(), H100, Cache(page_size=16), [1024, 4096])
    figure = draw_cache(points, "a problem", "a device")
    lines = {str(line.get_label()): list(line.get_ydata()) for line in figure.axes[0].lines}
    assert lines["decoding"] == [point.total_bytes for point in points]
    assert lines["of it the table of pages"] == [point.page_bytes for point in points]
    assert [label.split()[0] for label in lines] == ["FlashAttention-2,", "decoding", "of", "of"]


@pytest.mark.wide
def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "cache.png"
    assert run("sweep --over cache --points 2 --plot", str(path)).exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")


# -- what is wrong ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("predict --decode --backward", "--backward cannot go with --decode"),
        ("verify --decode --deterministic", "--deterministic cannot go with --decode"),
        ("explain --decode --mask", "--mask cannot go with --decode"),
        ("predict --decode --bias", "--bias cannot go with --decode"),
        ("predict --decode --block-mask", "--block-mask"),
        ("predict --decode --algorithm fa1", "--algorithm cannot go with --decode"),
        ("predict --decode --tiling 64x64", "--tiling cannot go with --decode"),
        ("predict --decode --key-lengths 5", "--cache-seqlens has the keys of each sequence"),
        ("predict --decode --page-size 24", "page_size must be a multiple of 16, got 24"),
        ("predict --decode --page-size 48 --seqlen-k 100", "must divide --seqlen-k, 100 keys, got 48"),
        ("predict --decode --cache-seqlens 9000", "at most 8,192, the keys that the cache has room for, got 9,000"),
        ("verify --decode --append 2 --cache-seqlens 191", "at most 190, the keys that the cache has room for less 2 new ones"),
        ("predict --decode --batch 2 --cache-seqlens 1,2,3", "one length, or one for each of 2 sequences, got 3"),
        ("predict --decode --cache-seqlens a", "--cache-seqlens"),
        ("predict --decode --append 9000", "--append"),
        ("predict --decode --seqlen 0", "at least one query"),
        ("predict --decode --num-splits 257", "num_splits must be between 1 and 256, got 257"),
        ("predict --decode --softcap nan", "softcap must be between"),
        ("predict --decode --sram 1KB", "does not fit"),
        ("predict --decode --device T4 --dtype bfloat16", "compute capability 8.0"),
        ("predict --seqlen 8 --head-dim 8 --page-size 16", "--page-size is for --decode"),
        ("explain --num-splits 4", "--num-splits is for --decode"),
        ("sweep --over sram --decode", "--over cache"),
        ("sweep --over cache --seqlen-k 64", "without --seqlen-k"),
        ("sweep --over cache --cache-seqlens 64", "without --cache-seqlens"),
        ("sweep --over cache --tiling paper", "--tiling cannot go with --decode"),
        ("verify --decode --max-seconds 0.0001", "--max-seconds"),
        ("verify --decode --batch 64 --heads 32 --kv-heads 8 --seqlen-k 8192", "estimated to take"),
    ],
)
def test_wrong_input_is_one_line(command: str, says: str) -> None:
    refused = run(command)
    assert refused.exit_code == 2 and refused.stdout == "" and refused.stderr.count("\n") == 1
    assert says in refused.stderr and refused.stderr.startswith("Error: ")


def test_sizes_that_are_not_given_are_decoding_s_own() -> None:
    found = report("predict --decode")["problem"]
    sizes = ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "head_dim", "causal")
    assert [found[name] for name in sizes] == [1, 32, 8, 1, 8192, 128, True]
    assert report("predict --decode --heads 3")["problem"]["kv_heads"] == 3
    assert report("predict --heads 4 --decode --kv-heads 2 --no-causal")["problem"]["causal"] is False
    assert report("predict --decode --page-size 48")["problem"]["seqlen_k"] == 8208  # whole pages
    assert report("explain")["problem"]["seqlen_q"] == 4096  # as ever


@pytest.mark.parametrize(
    "command", ["explain --decode --batch 64 --all", "predict --decode --page-size 16 --append 1", "sweep --over cache --batch 64"]
)
def test_nothing_is_wider_than_the_terminal_and_no_number_is_lost(command: str) -> None:
    def numbers(columns: int) -> set[str]:
        result = CliRunner(env={"COLUMNS": str(columns)}).invoke(main, command.split())
        assert result.exit_code == 0 and max(map(len, result.stdout.splitlines())) <= columns
        return {word.strip("();,:.") for word in result.stdout.split()}

    assert numbers(60) == numbers(80) == numbers(1000)
