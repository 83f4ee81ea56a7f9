"""Traces of decoding: moves sum to the theory's bytes, lie on their sequence's pages, and make each score that is seen once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from cases_decode import Case, cases
from cupyflash import Device, Problem
from cupyflash.schedules import Cache, DecodeSchedule, plan_decode
from cupyflash.schedules.decode import seen_keys
from cupyflash.sim import theory
from cupyflash.sim.cli import main
from cupyflash.sim.numbers.gathered import one_call
from cupyflash.sim.numbers.yardstick import draw_decode
from cupyflash.sim.trace import Trace, refuse_longer, rooms_of, trace
from cupyflash.sim.trace.page import COLUMNS, report, seen, seen_by_sequence
from suites import sweep, wide

pytest.importorskip("cupy")
A100 = Device.named("A100-40GB")


NONE = Cache()


def call(
    cache: Cache = NONE, lengths: tuple[int, ...] | None = (70, 41), splits: int = 2, n_q: int = 3, **asked: Any
) -> DecodeSchedule:
    options = {"causal": True, "padded": True, "key_lengths": lengths} | asked
    return plan_decode(Problem(2, 4, 2, n_q, 96, 16, "float16", **options), A100, cache, num_splits=splits, lse=True)


CALLS = {
    "pages, new keys, a tree": lambda: call(Cache(5, 16, 12, tree=True)),
    "one array": lambda: call(lengths=None),
    "new keys of several blocks": lambda: call(Cache(80), (7, 3), 3),
    "pages that no block ends with": lambda: call(Cache(0, 48, 5)),
    "one split": lambda: call(Cache(1, 96, 3), splits=1, n_q=1),
    "rows in several tiles": lambda: call(Cache(2), (60, 0), n_q=140),
    "a window": lambda: call(causal=False, window=(20, 0)),
}


def assert_of_decoding(made: Trace) -> None:
    """Check everything that holds for any trace: bytes, keys and scores."""
    s = made.schedule
    assert isinstance(s, DecodeSchedule) and made.decoding is not None
    assert made.traffic == made.executed == theory.traffic(s) and made.agrees
    lengths, table = made.decoding.arrays["cache_seqlens"], made.decoding.arrays.get("block_table")
    for move in (each for each in made.moves if each.tensor in ("K", "V", "K_new", "V_new")):
        held = made.tensors[move.tensor]
        keys = held.keys_of(move)
        assert keys.first // s.block_cols == (keys.end - 1) // s.block_cols
        assert move.nbytes == (move.rows.end - move.rows.first) * held.shape[2] * held.itemsize
        sequence = move.block // s.splits // s.row_tiles // s.problem.kv_heads
        new = move.write or move.tensor.endswith("_new")
        assert (lengths[sequence] if new else 0) <= keys.first < keys.end <= lengths[sequence] + (s.cache.appended if new else 0)
        if table is not None and not move.tensor.endswith("_new"):
            page, place = divmod(keys.first, s.cache.page_size)
            assert divmod(move.rows.first, s.cache.page_size) == (table[sequence, page], place)
    assert_each_score_once(made, s)


def assert_each_score_once(made: Trace, s: DecodeSchedule) -> None:
    p = s.problem
    times = np.zeros((p.batch * p.heads, p.seqlen_q, p.seqlen_k), int)
    for tile in (tile for move in made.moves for tile in move.scores):
        times[tile.head, slice(*tile.rows), slice(*tile.cols)] += 1
    assert times.max(initial=0) <= 1
    assert p.options.key_lengths is not None
    for b, cached in enumerate(p.options.key_lengths):
        first, end = seen_keys(s, cached + s.cache.appended, np.arange(p.seqlen_q))
        keys = np.arange(p.seqlen_k)
        within = (first[:, None] <= keys) & (keys < end[:, None])
        assert (times[b * p.heads : (b + 1) * p.heads, within] == 1).all()


@pytest.mark.parametrize("name", [name if name.startswith("pages, new") else wide(name) for name in CALLS])
def test_the_moves_are_what_the_theory_counts(name: str) -> None:
    made = trace(CALLS[name]())
    assert not made.problems
    assert_of_decoding(made)
    told = report([made], [name], name)
    (player,) = told["players"]
    assert all(row[COLUMNS.index("line")] >= 0 for row in player["moves"])
    numbers, tensors = {line[0] for line in player["lines"]}, {each["name"] for each in player["tensors"]}
    for line, name_of_only in ((5, "block_table"), (8, "K_new"), (12, "O_part")):
        assert (line in numbers) == (name_of_only in tensors)


@pytest.mark.wide
@settings(max_examples=4)
@given(drawn=cases())
def test_random_calls_agree(drawn: list[Case]) -> None:
    for case in drawn:
        schedule = case.schedule_of(case.arrays()[0])
        try:
            refuse_longer(schedule)
        except ValueError:
            continue
        assert_of_decoding(trace(schedule, case.seed))


def test_about_how_many_moves_there_are_is_known_before() -> None:
    with pytest.raises(ValueError, match=r"at most 20,000 moves of tiles; decode makes about [\d,]+ or more here"):
        refuse_longer(plan_decode(Problem(16, 32, 8, 1, 8192, 64, "float16"), A100, Cache(0, 16, 8192)))


def test_a_tree_is_drawn_beside_positions_and_lengths() -> None:
    s = CALLS["pages, new keys, a tree"]()
    decoding = draw_decode(s.problem, s.cache)
    tree = decoding.arrays["tree_mask"]
    for with_mask in (True, False):
        kept = seen_by_sequence(decoding, with_mask).reshape(2, 4, 3, -1)
        assert kept.shape[-1] == 75  # the longest sequence's
        for b, keys in enumerate((75, 46)):
            expected = np.tri(3, keys, keys - 3, dtype=bool)
            if with_mask:
                expected[:, keys - 3 :] &= tree[b]
            assert (kept[b, :, :, :keys] == expected).all() and not kept[b, ..., keys:].any()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"cache": Cache(0, 16, 12)}, "takes no pages"),
        ({"cache": Cache(1), "lengths": (70, 41)}, "takes no new keys to append"),
        ({"cache": Cache(tree=True)}, "takes no tree mask"),
        ({"lengths": (70, 41)}, "with causal and 3 queries all sequences must have as many keys, got 70, 41"),
    ],
)
def test_what_attention_cannot_do_with_a_cache_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        one_call(call(**given))


@sweep(20, 200)
def test_beside_decoding_each_row_sees_the_same_keys(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 96), min_size=2, max_size=2).map(tuple) | st.integers(0, 96).map(lambda n: (n, n)))
    side = st.none() | st.integers(0, 120)
    asked = {"causal": False, "window": (data.draw(side), data.draw(side))}
    schedule = call(lengths=lengths, n_q=data.draw(st.integers(1, 4)), **asked)
    decoding = draw_decode(schedule.problem, schedule.cache)
    try:
        beside = one_call(schedule)
    except ValueError:
        assert len(set(lengths)) > 1
        return
    assert (seen(beside, True) == seen_by_sequence(decoding, True)).all()


def command(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["trace", "--decode", *arguments])


SMALL = ("--head-dim", "16", "--seqlen-k", "96", "--cache-seqlens", "70,41")


def test_decoding_is_played_beside_attention_on_the_same_cache(tmp_path: Path) -> None:
    result = command(*SMALL, "--algorithms", "decode,fa2", "--json", "--html", str(tmp_path / "out.html"))
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    decode, fa2 = told["players"]
    assert [decode["name"], fa2["name"]] == ["Flash-Decoding", "FlashAttention-2"] and told["cols"] == 70
    assert "41 to 70 keys cached" in told["title"] and (tmp_path / "out.html").stat().st_size > 20_000
    once, twice = ({each["name"]: each["read_bytes"] for each in player["tensors"]}["K"] for player in (decode, fa2))
    assert twice == 2 * once  # two query heads share a key head


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--algorithms", "decode,fa2", "--page-size", "16"), "attention, beside decoding, takes no pages"),
        (("--algorithms", "fa2-backward"), "got 'fa2-backward'"),
        (("--algorithm", "fa2"), "--algorithm cannot go with --decode"),
        (("--backward",), "--backward cannot go with --decode"),
        (("--cache-seqlens", "300"), "at most 192, the keys that the cache has room for"),
        (("--num-splits", "300"), "num_splits must be between 1 and 256"),
        (("--seqlen-k", "65536", "--batch", "4", "--num-splits", "256"), "at most 20,000 moves of tiles"),
    ],
)
def test_wrong_input_is_one_line(arguments: tuple[str, ...], says: str) -> None:
    result = command(*arguments)
    assert result.exit_code == 2 and says in result.output and "Traceback" not in result.output


@pytest.mark.parametrize(("cache", "room"), [(Cache(), "length"), (Cache(0, 16, 12), "pages")])
def test_the_room_of_lengths_and_pages_has_the_name_of_what_it_holds(cache: Cache, room: str) -> None:
    rooms, inside = rooms_of(trace(call(cache)), 0)
    assert [each.name for each in rooms] == ["Q", "K, V", room] and inside["cache_seqlens"] == room
