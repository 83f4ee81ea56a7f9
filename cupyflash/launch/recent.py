"""A store of recent results, of limited size."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Made = TypeVar("Made")


class Recent(Generic[Key, Made]):
    """Things by their keys, of which those that were asked for least lately go once all together are larger than `most`.

    `size` is that of a key and its thing. The newest stays, however large it is. Threads may ask at once.
    """

    def __init__(self, most: int, size: Callable[[Key, Made], int]) -> None:
        self.most, self.size = most, size
        self._kept: dict[Key, Made] = {}  # the newest last

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def total(self) -> int:
        return sum(self.size(key, made) for key, made in list(self._kept.items()))

    def get(self, key: Key) -> Made | None:
        """The kept result, if it is still there."""
        found = self._kept.pop(key, None)
        if found is not None:
            self._kept[key] = found
        return found

    def keep(self, key: Key, made: Made) -> Made:
        self._kept[key] = made
        over = self.total - self.most
        for old, each in list(self._kept.items())[:-1]:
            if over <= 0:
                break
            over -= self.size(old, each)
            self._kept.pop(old, None)
        return made
