"""What everything asks that is looked up in an index: the index, or ``.metadata`` once the index proved damaged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, Protocol, TypeVar

from torch.distributed.checkpoint.metadata import Metadata

from robust_dcp.storage.index.form import DamagedIndex
from robust_dcp.storage.index.stored_index import StoredIndex

__all__ = ["IndexOrMetadata", "or_decoded"]

logger = logging.getLogger(__name__)

_Method = TypeVar("_Method", bound=Callable[..., Any])
_Answer = TypeVar("_Answer")


class IndexOrMetadata:
    """The index, or the decoded ``.metadata`` after the index has turned out to be damaged."""

    def __init__(self, index: StoredIndex, decode: Callable[[], Metadata]) -> None:
        self.index = index
        self.decoded: Metadata | None = None
        self._decode = decode
        self._numbers: dict[str, int | None] = {}

    def put_aside(self, error: DamagedIndex) -> Metadata:
        """Go on with ``.metadata``."""
        if self.decoded is None:
            logger.warning("%s; .metadata is read instead", error.message)
            self.decoded = self._decode()
        return self.decoded

    def ask(self, question: Callable[[StoredIndex], _Answer]) -> _Answer | None:
        """Put a question to the index; ``None`` if it is damaged."""
        if self.decoded is None:
            try:
                return question(self.index)
            except DamagedIndex as error:
                self.put_aside(error)
        return None

    def look_up(self, names: Iterable[str]) -> None:
        """Find many names at once."""
        new = [name for name in names if name not in self._numbers]
        found = self.index.names.find_all(new)
        self._numbers.update((name, found.get(name)) for name in new)

    def number(self, name: Any) -> int | None:
        """The number of a stored name. Answers are remembered."""
        if not isinstance(name, str):
            return None
        if name not in self._numbers:
            self.look_up([name])
        return self._numbers[name]


class _FromIndex(Protocol):
    _source: IndexOrMetadata

    def _decoded(self, metadata: Metadata) -> Any: ...


def or_decoded(method: _Method) -> _Method:
    """Make a method ask the index, and if that is damaged, ask the decoded ``.metadata``."""

    @wraps(method)
    def ask(self: _FromIndex, *args: Any) -> Any:
        decoded = self._source.decoded
        if decoded is None:
            try:
                return method(self, *args)
            except DamagedIndex as error:
                decoded = self._source.put_aside(error)
        return getattr(self._decoded(decoded), method.__name__)(*args)

    return ask  # type: ignore[return-value]
