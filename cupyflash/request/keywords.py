"""The keywords of the calls: one list, which editors read as it stands and `help` as the calls' signatures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cupyflash.request.score import Mask, Score
    from cupyflash.tiled_mask import TiledMask
    from cupyflash.tiling import TilingChoice

    AnyArray = Any  # of NumPy or CuPy, or an object that offers its memory (DLPack, the CUDA array interface)

NO_ORIGIN = (0, 0, 0, 0)
# The keywords of named scores (named_scores.py): numbers, which each call brings, and arrays.
SCORE_NUMBERS = ("softcap",)
SCORE_ARRAYS = ("alibi_slopes",)
# The order of the axes of q, k, v and o
LAYOUTS = ("bhnd", "bnhd")


class Scores(TypedDict, total=False):
    """The keywords of every call: which scores count, and how they are transformed."""

    causal: bool
    window: tuple[int | None, int | None] | None
    mask: AnyArray | Mask | TiledMask | None
    sinks: AnyArray | None
    score: Score | None
    softcap: float | None
    alibi_slopes: AnyArray | None
    scale: float | None


class Seeded(Scores, total=False):
    dropout: float
    seed: int | None


class Dropped(Seeded, total=False):
    offset: int


class PackedKeywords(Dropped, total=False):
    dropout_origin: tuple[int, int, int, int]
    tiling: TilingChoice


class HeadsKeywords(PackedKeywords, total=False):
    bias: AnyArray | None
    key_lengths: AnyArray | Sequence[int] | None
    block_mask: AnyArray | None
    score_dtype: str | None
    algorithm: str
    layout: str


class Returned(TypedDict, total=False):
    return_lse: bool
    out: AnyArray | None


class ForwardKeywords(HeadsKeywords, Returned, total=False):
    """`attention`'s."""


class Gradients(TypedDict, total=False):
    deterministic: bool


class BackwardKeywords(HeadsKeywords, Gradients, total=False):
    """`attention_backward`'s and `attention_vjp`'s."""

    return_dbias: bool
    return_dscore: bool | tuple[str, ...]


class SecondOrder(Dropped, total=False):
    """`attention_double_backward`'s."""

    bias: AnyArray | None
    key_lengths: AnyArray | Sequence[int] | None
    layout: str
    deterministic: bool


class Tangents(SecondOrder, total=False):
    """`attention_jvp`'s."""

    return_lse: bool


class Varlen(PackedKeywords, Returned, total=False):
    """`attention_varlen`'s."""


class VarlenBackward(PackedKeywords, Gradients, total=False):
    """`attention_varlen_backward`'s."""

    return_dscore: bool | tuple[str, ...]


class CacheKeywords(TypedDict, total=False):
    k: AnyArray | None
    v: AnyArray | None
    block_table: AnyArray | None
    tree_mask: AnyArray | None
    num_splits: int | None
    layout: str


class Decode(CacheKeywords, Scores, Returned, total=False):
    """`attention_decode`'s."""


class RingGradients(Dropped, Gradients, total=False):
    """`ring_attention_backward`'s and `ring_attention_vjp`'s."""

    layout: str
    gather_kv: bool


class Ring(Dropped, total=False):
    """`ring_attention`'s."""

    layout: str
    gather_kv: bool
    return_lse: bool


class TensorsVarlen(Seeded, Gradients, total=False):
    """`torch.attention_varlen`'s."""

    return_lse: bool


class TensorsHeads(TensorsVarlen, total=False):
    """`torch.attention`'s."""

    bias: AnyArray | None
    key_lengths: AnyArray | Sequence[int] | None
    algorithm: str
    layout: str


class TensorsDecode(CacheKeywords, Scores, total=False):
    """`torch.attention_decode`'s."""

    return_lse: bool


# What only gradients have.
OF_GRADIENTS = frozenset(("deterministic", "return_dbias", "return_dscore"))
# What is asked for where a call says nothing; None of all others.
DEFAULTS: Mapping[str, Any] = MappingProxyType(
    dict.fromkeys(("causal", "return_lse", "deterministic", "return_dbias", "return_dscore", "gather_kv"), False)
    | {"dropout": 0.0, "offset": 0, "dropout_origin": NO_ORIGIN, "algorithm": "auto", "layout": "bhnd"}
)


_IN_BOOLS = ", of bool; numbers that are added to the scores are bias"
_SIDES = "=(left, right), with None in place of -1"
# Other libraries' keywords: the name here, and words about the difference.
ELSEWHERE: Mapping[str, tuple[str, str]] = MappingProxyType(
    dict.fromkeys(("softmax_scale", "sm_scale", "scaling"), ("scale", ""))
    | dict.fromkeys(("window_size", "local_window_size", "sliding_window"), ("window", _SIDES))
    | dict.fromkeys(("logits_soft_cap", "logits_softcap", "soft_cap", "logit_cap"), ("softcap", ""))
    | dict.fromkeys(("return_attn_probs", "return_softmax_lse", "return_softmax", "return_residual"), ("return_lse", ""))
    | dict.fromkeys(("key_padding_mask", "key_value_seq_lengths", "kv_seqlen", "seqused_k"), ("key_lengths", ", numbers of keys"))
    | dict.fromkeys(("tensor_layout", "qkv_format", "kv_layout"), ("layout", ", 'bhnd' or 'bnhd'"))
    | dict.fromkeys(("s_aux", "learnable_sink"), ("sinks", ""))
    | {
        "is_causal": ("causal", ", aligned bottom-right"),
        "attn_mask": ("mask", _IN_BOOLS),
        "attn_bias": ("bias", ""),
        "dropout_p": ("dropout", ""),
        "dropout_rate": ("dropout", ""),
        "enable_gqa": ("", "k and v may have fewer heads than q without it"),
        "score_mod": ("score", "=cupyflash.Score(function)"),
        "mask_mod": ("mask", "=cupyflash.Mask(function)"),
        "block_tables": ("block_table", ""),
        "page_table": ("block_table", ""),
    }
)


# Keywords that only some calls have, and words for the others.
OF_OTHER_CALLS: Mapping[str, str] = MappingProxyType(
    {
        "deterministic": "the forward gives the same bits each time, and the gradients' calls have the choice",
        "layout": "packed arrays are (total, h, d)",
    }
)


class Keywords(NamedTuple):
    """The keywords of a call: their defaults by name, and the names that are required."""

    call: str
    defaults: Mapping[str, Any]
    required: frozenset[str]

    def complete(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The given keywords with the defaults of the others. TypeError for names that the call does not have."""
        for name in given:
            if name not in self.defaults:
                raise TypeError(f"{self.call}() got an unexpected keyword argument {name!r}{self._hint(name)}")
        return {**self.defaults, **given}

    def _hint(self, name: str) -> str:
        """Words for who has a keyword from another library, or has misspelt one."""
        from difflib import get_close_matches

        if name in OF_OTHER_CALLS:
            return f": {OF_OTHER_CALLS[name]}"
        ours, words = ELSEWHERE.get(name, (name, ""))
        if ours in self.defaults:
            return f": here it is {ours}{words}"
        if not ours:
            return f": {words}"
        if ours != name:
            return f": {self.call} has no {ours}"
        near = get_close_matches(name, self.defaults, 1)
        return f": did you mean {near[0]}?" if near else ""


Function = TypeVar("Function", bound=Callable[..., Any])


def asks(keywords: Any, **other: Any) -> Callable[[Function], Function]:
    """Gives a function that takes `**asked` the signature with these keywords, and `other` defaults than the usual ones."""

    def signed(function: Function) -> Function:
        import inspect

        own = [each for each in inspect.signature(function).parameters.values() if each.kind is not each.VAR_KEYWORD]
        of_name = {name: getattr(each, "__forward_arg__", each) for name, each in keywords.__annotations__.items()}
        usual = {name: DEFAULTS.get(name) for name in of_name} | other
        named = [inspect.Parameter(name, own[0].KEYWORD_ONLY, default=usual[name], annotation=of_name[name]) for name in of_name]
        function.__signature__ = inspect.signature(function).replace(parameters=[*own, *named])  # type: ignore[attr-defined]
        return function

    return signed


def keywords_of(function: Callable[..., Any]) -> Keywords:
    """The keywords of a function, as its signature has them."""
    import inspect

    parameters: Mapping[str, Any] = inspect.signature(function).parameters
    defaults = {name: None if each.default is each.empty else each.default for name, each in parameters.items()}
    required = frozenset(name for name, each in parameters.items() if each.default is each.empty)
    return Keywords(function.__name__, MappingProxyType(defaults), required)
