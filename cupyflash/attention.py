"""The call: exact attention of CuPy arrays on the GPU, or of NumPy arrays on the simulated device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from cupyflash.arrays import Array, Layout
from cupyflash.binding import by_tensor
from cupyflash.dispatch import as_array, as_arrays, as_integers, device_of, placed, refuse_out, target
from cupyflash.dropout import NO_ORIGIN, Dropout
from cupyflash.launcher import Prepared, kept, prepare, require_lengths, vectors_on_device
from cupyflash.named_scores import one_score
from cupyflash.options import Options, Pattern, require_choice, require_flag
from cupyflash.problem import Problem
from cupyflash.schedules import choose, plan
from cupyflash.score import Score, captured_among, captured_by, captured_values, check_captured, of_mask, seen_by
from cupyflash.simulated import PreparedSimulation
from cupyflash.tensor_maps import first_refusal
from cupyflash.tiled_mask import Given
from cupyflash.tiling import TilingChoice

ALGORITHMS = ("auto", "fa1", "fa2", "fa3", "standard", "decode")


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Any | None = None,
    bias: Any | None = None,
    key_lengths: Any | None = None,
    block_mask: Any | None = None,
    sinks: Any | None = None,
    score: Score | None = None,
    softcap: float | None = None,
    alibi_slopes: Any | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    offset: int = 0,
    dropout_origin: tuple[int, int, int, int] = NO_ORIGIN,
    scale: float | None = None,
    score_dtype: str | None = None,
    algorithm: str = "auto",
    tiling: TilingChoice = None,
    return_lse: bool = False,
    out: Any | None = None,
) -> Any:
    """O = softmax(scale Q K^T + bias) V, computed exactly and by tiles.

    Shapes: q (n_q, d), (h, n_q, d) or (b, h, n_q, d); k the same with n_k and h_kv heads, where h_kv divides h; v as k, with d_v
    in place of d if you like. d and d_v are 1 to 256, and to 512 in half types for "fa2", gradients too; float16,
    bfloat16 (compute capability 8.0) or float32, all alike; any strides whose last axis is contiguous. `scale` is 1 / sqrt(d) when
    None. Scores are float32 numbers: what finite inputs make of them up to 2e38 comes out right, beyond that as NaN.

    What a row sees: `causal` is aligned bottom-right, row r sees key c when c <= r + n_k - n_q; `window` = (left, right) lets
    it see the keys from r + n_k - n_q - left to r + n_k - n_q + right, None for no limit on a side; with `causal` right is 0.
    To see the first keys beside a window, as in StreamingLLM, the window is part of a mask, which skips tiles as well:
    `Mask("k <= q and (q - k < width or k < first)", width=512, first=4)`; `window` and `mask` together are an *and*.
    `mask`, of bool, is true where row and key go together, or it is a `Mask`, one condition that is compiled into the kernels;
    `bias`, of q's dtype, is added to the scaled scores; arrays broadcast to (..., n_q, n_k). Of a mask it is found first which
    tiles it leaves empty, which are then neither loaded nor computed, and which it leaves whole, which take the unmasked path
    ("fa2"; others ask the mask for every score). `block_mask` finds it once for many calls.
    `key_lengths`, integers of shape (b,) from 0 to n_k in an array or a list, says how many keys each batch has; what k and v
    hold behind them is never read. `block_mask`, of bool, (b or 1, h or 1, Tr, Tc) with fewer axes at will, keeps blocks of
    `tiling` (Br, Bc), where Tr = ceil(n_q / Br) and Tc = ceil(n_k / Bc): what it leaves out is neither loaded nor computed ("fa1"
    and "fa2"). The masks add up.
    `score`, a `Score`, is what becomes of each scaled score before bias and masks: one line, compiled into the kernels
    (all of them take one; "fa3" none with sin or cos). Two such lines have names: `softcap`, a positive number, makes scores
    softcap tanh(s / softcap); `alibi_slopes`, float32 of shape (h,) or (b, h), then subtracts slope |q - k|, where q is the row's
    place on the keys' axis (r + n_k - n_q). Neither goes with `score`, which may say the same.
    `dropout`, 0 to below 1, is the probability with which each weight of the softmax is dropped ("fa1", "fa2" and "standard");
    those that are kept are multiplied by 1 / (1 - dropout), and L is that without dropout. Which are dropped follows from `seed`,
    an integer below 2**64, from `offset`, one below 2**32 that may count the calls, and from batch, head, row and key, whatever
    the algorithm, its tiling, or the device: `dropout_mask` shows it, `cupyflash.dropout.Dropout` says how. Of a part of a larger
    call `dropout_origin` says where in that its first (batch, head, row, key) is; the row must be a multiple of 32, the key of 16.
    Probabilities are rounded to multiples of 2**-16. (A CUDA graph keeps the seed and offset that it was captured with.)
    `sinks`, float32 of shape (h,), is one more score (a logit: no key has it) of each of a head's rows, without a value. L has it,
    also where no key is seen; where parts of the keys are merged, one of them gets the sinks.
    A row that sees no key gives zeros and a log-sum-exp of -inf. What else is masked has weight zero, but a NaN or infinity in a
    masked row of v may still show in rows that share a tile with it. (Lengths on a GPU are not looked at beforehand: one that is
    out of range there is taken as 0 or n_k.)

    `algorithm`: "auto", the default, runs "fa3", FlashAttention-3, on a Hopper where that takes the call and a model predicts it to
    be faster (`cupyflash explain` says why not); "decode", which splits the keys over thread blocks, for few queries against many
    keys where the models predict that to be faster; and else "fa2", FlashAttention-2. The tile is the one that a model of the chip
    predicts to be fastest, and not the FlashAttention paper's Bc = ceil(M / 4d), Br = min(Bc, d). "fa1" (FlashAttention,
    Algorithm 1) is that formula at work, rounded to what fits. "standard" is Algorithm 0, with S and P in memory in q's dtype, so
    that scores beyond its range overflow; with `score_dtype` "float32" it keeps S in that. `tiling`: None for these,
    (block_rows, block_cols) that the kernel runs, or "paper" for the formula to the letter, which runs where it gives multiples of
    16 that fit.
    `out`, if given, receives O: q's dtype, shape (..., n_q, d_v), positive strides, no memory shared with an input. Where a call
    fails after its arguments were checked, for want of memory or by the device, a part of O may be there.

    Returns O in q's dtype on q's device; with `return_lse` also L, the natural logarithm of the sum of exponentials of each
    row, float32 of shape q.shape[:-1]. CuPy arrays run on their device and the current stream; NumPy arrays run the same
    kernel on the simulated device (see `simulated_device`). Other objects that offer their memory are taken as views: through
    DLPack, in order with what their own stream still does, or else the CUDA array interface.

    While a CUDA graph is captured, a call keeps what it allocates for itself for good; arrays that it is given or returns are
    its caller's to keep for as long as the graph lives, and no list or NumPy array can be copied to the GPU then.

    Raises TypeError or ValueError for bad arguments before anything is compiled or launched; RuntimeError for NumPy arrays
    that would take the simulated device too long.
    """
    score = one_score(score, softcap, alibi_slopes)
    given = Given.of(mask)
    captured, numbers = captured_values(score, given.function)
    dropped = Dropout.asked(dropout, seed, offset, dropout_origin)
    form = None if score is None else score.form
    dropping = dropped is not None
    options = Options.asked(causal=causal, window=window, scale=scale, score=form, dropout=dropping, score_dtype=score_dtype)
    require_choice("algorithm", algorithm, ALGORITHMS)
    require_flag("return_lse", return_lse)
    inputs = as_arrays(q=q, k=k, v=v, mask=given.array, bias=bias, block_mask=block_mask, sinks=sinks, **captured)
    options = given.asked(options, inputs["q"], inputs["k"])
    arrays = inputs if out is None else inputs | {"out": as_array("out", out)}
    lengths = {} if key_lengths is None else {"key_lengths": as_integers("key_lengths", key_lengths)}
    gpu, beside = placed(arrays, lengths)
    with device_of(gpu, **arrays, **beside):
        call = kept(prepare_forward, gpu, arrays | lengths, options, algorithm, tiling, bool(return_lse), of_mask(numbers))
        if out is not None:
            refuse_out(arrays["out"], **inputs, **beside)
        require_lengths(gpu, inputs | lengths)
        inputs |= vectors_on_device(gpu, inputs | lengths)
        inputs |= given.states(call.given_tiles, gpu, inputs | dict(numbers))
        own = by_tensor(inputs if out is None else inputs | {"out": arrays["out"]})
        made = call.launch(own, dict(numbers) if dropped is None else dict(numbers) | dropped.numbers)
    o = made["O"] if out is None else out
    return (o, made["L"]) if return_lse else o


def prepare_forward(
    gpu: bool,
    arrays: Mapping[str, Array],
    options: Options,
    algorithm: str,
    tiling: TilingChoice,
    lse: bool,
    numbers: tuple[tuple[str, float], ...] = (),
) -> Prepared | PreparedSimulation:
    problem = pose(gpu, arrays, options, numbers)
    device, simulation = target(gpu)
    q, v = arrays["q"], arrays["v"]
    made = {} if "out" in arrays else {"O": Layout.contiguous((*q.shape[:-1], v.shape[-1]), q.dtype)}
    if lse:
        made["L"] = Layout.contiguous(q.shape[:-1], np.float32)
    by_name = by_tensor(arrays) | made | dict(numbers)
    if algorithm == "auto":
        algorithm = choose(problem, device, tiling, first_refusal({tensor: by_name[tensor] for tensor in "QKVO"})).algorithm
    schedule = plan(problem, device, algorithm, tiling, lse=lse)
    return prepare(schedule, simulation, by_name, made)


def pose(gpu: bool, arrays: Mapping[str, Array], options: Options, numbers: Iterable[tuple[str, float]]) -> Problem:
    """The problem of a call's arrays, captured ones among them, and captured numbers; of NumPy's also what a mask function says."""
    captured = captured_among(arrays)
    problem = Problem.from_arrays(**{name: array for name, array in arrays.items() if name not in captured}, options=options)
    check_captured(problem, captured)
    form = options.mask_function
    if gpu or form is None:
        return problem
    return problem.asking(pattern=Pattern.of(seen_by(form, problem, captured_by(form, {**captured, **dict(numbers)}))))
