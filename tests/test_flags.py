"""Each option that poses a problem, in each command that has it: taken, and seen in what the command says."""

from __future__ import annotations

import shlex

import click
import pytest
from click.testing import CliRunner

from cupyflash.launch.resources import Resources
from cupyflash.request.options import OPTIONS
from cupyflash.sim.cli import main
from cupyflash.sim.cli.options import problem_options

# By the name in Python: what stands beside it, and itself.
FLAGS = {
    "seqlen": ("", "--seqlen 48"),
    "seqlen_k": ("", "--seqlen-k 80"),
    "head_dim": ("", "--head-dim 32"),
    "head_dim_v": ("", "--head-dim-v 32"),
    "heads": ("", "--heads 4"),
    "kv_heads": ("--heads 4", "--kv-heads 2"),
    "batch": ("", "--batch 2"),
    "dtype": ("", "--dtype float32"),
    "device": ("", "--device T4"),
    "sram": ("", "--sram 32KB"),
    "causal": ("", "--causal"),
    "window": ("", "--window 20,5"),
    **{name: ("", f"--{name}") for name, each in OPTIONS.items() if each.flag},
    "key_lengths": ("", "--key-lengths 50"),
    "softcap": ("", "--softcap 30"),
    "alibi": ("", "--alibi"),
    "score": ("", "--score 's*s'"),
    "mask_function": ("", "--mask-function 'k<=q'"),
    "capture": ("", "--score 's+x' --capture x=2"),
    "dropout": ("", "--dropout 0.1"),
    "bias_dtype": ("--bias", "--bias-dtype float32"),
    "score_dtype": ("--algorithm standard", "--score-dtype float32"),
    "algorithm": ("--tiling fitted", "--algorithm decode"),
    "backward": ("", "--backward"),
    "deterministic": ("--backward", "--deterministic"),
    "tiling": ("--algorithm fa2", "--tiling 32x16"),
    "lse": ("", "--lse"),
    "decode": ("", "--decode"),
    "cache_seqlens": ("--decode", "--cache-seqlens 20"),
    "page_size": ("--decode", "--page-size 16"),
    "append": ("--decode", "--append 2"),
    "tree": ("--decode", "--tree"),
    "num_splits": ("--decode", "--num-splits 2"),
}
POSED = problem_options(seqlen=1, head_dim=1, backward=True, decode={})
POSING = {one.name for one in click.command()(POSED(lambda request: None)).params}
# What commands are given besides: those that execute say that it would take longer than this.
COMMANDS = {
    "predict": "",
    "explain": "",
    "sweep": "--over sram --from 16KB --to 32KB --points 2",
    "inspect": "",
    "verify": "--max-seconds 1e-9",
    "trace": "--max-seconds 1e-9",
}
# A sweep over SRAM has neither --sram nor --decode; a kernel is the same with L.
EXCEPT = {"sweep": {"sram", *(name for name, words in FLAGS.items() if "--decode" in words)}, "inspect": {"lse"}}


def test_every_option_is_here() -> None:
    assert set(FLAGS) == POSING


@pytest.mark.parametrize("command", COMMANDS)
def test_an_option_is_taken_and_seen(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is ignored would leave what is printed as it was."""
    needs = Resources("a kernel", threads=128, registers=64, stack_bytes=0, spill_bytes=0, shared_bytes=0)
    monkeypatch.setattr("cupyflash.launch.resources.resources", lambda kernels, _: [needs for _ in kernels])  # nothing is compiled
    given = f"{command} --seqlen 64 --head-dim 16 {COMMANDS[command]}"
    for name in FLAGS.keys() & {one.name for one in main.commands[command].params} - EXCEPT.get(command, set()):
        beside, flag = FLAGS[name]
        without, found = (CliRunner().invoke(main, shlex.split(f"{given} {words}")) for words in (beside, f"{beside} {flag}"))
        if "--max-seconds" in given:
            assert found.exit_code == 2 and "is estimated to take" in found.output, (flag, found.output)
        else:
            assert found.exit_code == without.exit_code == 0, (flag, found.output)
            assert found.stdout != without.stdout, flag
