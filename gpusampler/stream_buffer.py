"""The samples of a stream that were read and not yet used, and where the stream is, so that both can be saved.

A sample is read once, given its place in the stream, measured and kept until a step takes it. The state is the source's
own with the kept samples, where the source has one; else the number of samples read, with the places of the kept ones,
which are read again. It also says whether the source has ended: many sources cannot, their state at the end is that of
a new beginning. Memory: at most `size` samples besides those of the current step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from gpusampler.errors import ParameterError
from gpusampler.sample_length import SampleLength, sample_length


class Item(NamedTuple):
    """A sample, its place in the stream, its length, and whether it was yielded before."""

    place: int
    length: int
    sample: Any
    repeat: bool = False


class Buffer:
    """Reads a source up to `size` samples ahead.

    Attributes:
        items: what is kept, oldest first; steps take from it.
        read: samples read from the source in this epoch.
        ended: whether those are all.
    """

    def __init__(
        self,
        source: Iterable[Any],
        size: int,
        column: Any,
        fn: Callable[[Any], int] | None,
        longest: int | None,
    ) -> None:
        """Keep the parameters; an unclear `column` or `fn` is found with the first sample."""
        self.items: list[Item] = []
        self.read = 0
        self.ended = False
        self._source, self._size, self._longest = source, size, longest
        self._column, self._fn = column, fn
        self._length: SampleLength | None = None
        self._iterator: Iterator[Any] | None = None
        self._source_state: Any = None  # loaded, and not yet given to the source
        self._skip = 0
        self._reread: list[list[Item]] = []

    @property
    def has_state(self) -> bool:
        """Whether the source can save where it is."""
        return hasattr(self._source, "state_dict") and hasattr(self._source, "load_state_dict")

    def restart(self) -> None:
        """Forget everything; the source is iterated from its beginning."""
        self.items, self.read, self.ended, self._iterator = [], 0, False, None
        self._source_state, self._skip, self._reread = None, 0, []

    def open(self) -> None:
        """Begin to iterate the source; after a state without one of the source's, read up to the place again.

        A source that had ended is left alone until the next epoch, which begins at its beginning.
        """
        if self.ended and not self._skip:
            return
        if self._source_state is not None:
            self._source.load_state_dict(self._source_state)  # type: ignore[attr-defined]
            self._source_state = None
        self._iterator = iter(self._source)
        if self._skip:
            self._read_again(self._iterator, self._skip)
            self._skip = 0

    def fill(self) -> None:
        """Read until `size` samples are kept or the source ends.

        Raises:
            ParameterError: a sample without a usable length, named by its place.
        """
        while self._iterator is not None and not self.ended and len(self.items) < self._size:
            try:
                sample = next(self._iterator)
            except StopIteration:
                self._iterator, self.ended = None, True
                return
            self.items.append(Item(self.read, self._measure(sample, self.read), sample))
            self.read += 1

    def state_dict(self) -> dict[str, Any]:
        """Where the source is, and what is kept."""
        source = self._source_state
        if source is None and self.has_state:
            source = self._source.state_dict()  # type: ignore[attr-defined]
        return {"read": self.read, "ended": self.ended, "items": self.packed(self.items), "source": source}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue there with the next `open`."""
        if (state["source"] is not None) != self.has_state:
            has, had = ("a", "no") if self.has_state else ("no", "a")
            raise ParameterError(f"state was saved with a source that has {had} state_dict, this one has {has} one")
        self.restart()
        self.read, self.ended = state["read"], state["ended"]
        if self.has_state:
            self._source_state = state["source"]
        else:
            self._skip = self.read
        self.items = self.unpacked(state["items"])

    def packed(self, items: list[Item]) -> list[tuple[Any, ...]]:
        """Items as plain tuples, with their samples only if the source cannot give them again."""
        return [(item.place, item.length, item.repeat, *([item.sample] if self.has_state else [])) for item in items]

    def unpacked(self, packed: list[Any]) -> list[Item]:
        """Items from tuples; where samples are read again, `open` fills them into the list."""
        items = [
            Item(place, length, sample[0] if sample else None, repeat) for place, length, repeat, *sample in packed
        ]
        if self._skip:
            self._reread.append(items)
        return items

    def _read_again(self, iterator: Iterator[Any], count: int) -> None:
        wanted = {item.place: item.length for items in self._reread for item in items}
        found = {}
        for place, sample in enumerate(islice(iterator, count)):
            if place in wanted:
                found[place] = sample
                length = self._measure(sample, place)
                if length != wanted[place]:
                    raise ParameterError(
                        f"the source gives other samples than before: sample {place} has length {length}, it had "
                        f"{wanted[place]}"
                    )
        if len(found) < len(wanted):
            raise ParameterError(f"the source gives fewer samples than before, when {count} were read")
        for items in self._reread:
            items[:] = [item._replace(sample=found[item.place]) for item in items]
        self._reread = []

    def _measure(self, sample: Any, place: int) -> int:
        try:
            if self._length is None:
                self._length = sample_length(sample, self._column, self._fn)
            length = self._length(sample)
        except ParameterError as error:
            raise ParameterError(f"sample {place} of the stream: {error}") from error
        if self._longest is not None and length > self._longest:
            raise ParameterError(f"sample {place} of the stream has length {length}, above max_tokens={self._longest}")
        return length
