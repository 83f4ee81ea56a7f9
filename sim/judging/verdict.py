"""A verdict: faults, conditions, and the draws that they are from, as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from cupyflash.basics import Report, Values
from cupyflash.words import plural

KINDS = {
    "wrong values": "an output differs from the reference by more than the bound",
    "accuracy": "few elements are beyond the bound by little, or errors are small beside ordinary results (a condition)",
    "unwritten": "elements of an output that nothing wrote",
    "shape": "an output has another shape than the reference's",
    "type": "an output has another type than the reference's",
    "outputs": "another number of outputs than the reference's",
    "changed input": "an array changed that the reference leaves as it is",
    "order": "another order of warps gives a wrong result",
    "bits": "another order of warps gives other bits, within the bound",
    "state": "a second call with equal inputs gives another result",
    "overwritten": "a later call changes the result of an earlier one",
    "raised": "the function raised an exception",
    "not launched": "no kernel ran",
    "finding": "the machine found a fault of a kernel: a race, an address out of bounds, unwritten memory, ...",
}
"""Kinds of faults, with their meanings. A finding's kind is the machine's own."""


@dataclass(frozen=True)
class Fault:
    """One fault or condition: its kind (of `KINDS`, or of a finding), a sentence, the draw that has it, and its evidence."""

    kind: str
    message: str
    draw: int
    evidence: Values = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.kind}: {self.message} [draw {self.draw}]"


@dataclass(frozen=True)
class Tried:
    """One draw: its number, words and shapes, its result, the launches and processor seconds that it took."""

    draw: int
    words: str
    inputs: Mapping[str, str]
    demanded: bool
    result: str
    launches: int
    seconds: float
    error: float
    """The largest error, as a part of the bound."""


@dataclass(frozen=True)
class Judgement:
    """The verdict on a function: right (with conditions, perhaps), wrong, or unfinished.

    Unfinished: the time ended before the draws for which a function has to be right, the first `demanded` of the `planned` ones.
    """

    function: str
    reference: str
    seed: int
    faults: tuple[Fault, ...]
    conditions: tuple[Fault, ...]
    tried: tuple[Tried, ...]
    planned: int
    demanded: int
    seconds: float

    @property
    def verdict(self) -> str:
        return "wrong" if self.faults else "right" if len(self.tried) >= self.demanded else "unfinished"

    def to_dict(self) -> Report:
        """Returns it for JSON."""
        return {
            "verdict": self.verdict,
            "function": self.function,
            "reference": self.reference,
            "seed": self.seed,
            "faults": [asdict(one) for one in self.faults],
            "conditions": [asdict(one) for one in self.conditions],
            "planned": self.planned,
            "seconds": round(self.seconds, 2),
            "tried": [asdict(one) for one in self.tried],
        }

    def text(self) -> str:
        """Returns the verdict as text."""
        launches = sum(one.launches for one in self.tried)
        head = f"{self.verdict}: {self.function} against {self.reference}"
        draws = f"{plural(len(self.tried), 'draw')} of {self.planned}"
        lines = [head, f"  {draws}, {plural(launches, 'launch', 'launches')}, {self.seconds:.1f} s"]
        drawn = {one.draw: one for one in self.tried}
        for title, some in (("faults", self.faults), ("conditions", self.conditions)):
            lines += [f"{title}:"] * bool(some)
            for one in some:
                inputs = ", ".join(f"{name} {text}" for name, text in drawn[one.draw].inputs.items())
                lines += [f"  {one}", f"    {drawn[one.draw].words}: {inputs}"]
        return "\n".join(lines)
