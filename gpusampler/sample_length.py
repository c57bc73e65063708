"""The length of one sample: which part of it counts, and how long that is.

A sample of a text dataset is a mapping whose `input_ids` has a length; processors return mappings that are no `dict`
(`UserDict`, `BatchFeature`, `BatchEncoding`). The part that counts is chosen once, from the first sample.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpusampler.errors import ParameterError, ParameterTypeError, quote
from gpusampler.lengths import explain_bad_length
from gpusampler.readers import COLUMNS, LIST_COLUMNS

SIZED_COLUMNS = (*LIST_COLUMNS, "input_values", "inputs_embeds", "labels")
"""Columns whose size is a length, in the order in which they are taken where there is none of `COLUMNS`."""


@dataclass(frozen=True)
class SampleLength:
    """Callable that returns a sample's length; pickles if `fn` does.

    Attributes:
        column: key of the part of a sample that counts; None for the whole sample.
        fn: the user's function, used instead.
    """

    column: Any = None
    fn: Callable[[Any], Any] | None = None

    def __call__(self, sample: Any) -> int:
        """Return the length.

        Raises:
            ParameterError: it is not a positive integer, or the sample has no such part.

        Example:
            >>> SampleLength("input_ids")({"input_ids": [5, 6, 7]}), SampleLength()([8, 9])
            (3, 2)
        """
        if self.fn is not None:
            length = self.fn(sample)
            self._check(length, "fn returned")
            return int(length)
        what = "the sample" if self.column is None else repr(self.column)
        try:
            value = sample if self.column is None else sample[self.column]
        except (KeyError, IndexError, TypeError) as error:
            raise ParameterError(f"no {what} in {_describe(sample)}") from error
        length = size_of(value, what)
        self._check(length, f"{what} has length")
        return length

    @staticmethod
    def _check(length: Any, what: str) -> None:
        reason = explain_bad_length(length)
        if reason is not None:
            raise ParameterError(f"{what} {quote(length, 40)}, which {reason}")


def sample_length(sample: Any, column: Any = None, fn: Callable[[Any], Any] | None = None) -> SampleLength:
    """Choose what counts as the length of samples like this one.

    Args:
        sample: the first sample.
        column: key in a mapping, or position in a tuple. Default: in a mapping the only key in `COLUMNS` that holds an
            integer, else the first of `SIZED_COLUMNS` that holds a sequence; else a sequence of numbers as a whole.
        fn: returns the length of a sample; instead of `column`.

    Raises:
        ParameterError: it is not clear what the length is; says what the sample holds.
    """
    if fn is not None:
        if column is not None:
            raise ParameterError(f"give column or fn, not both, got column={column!r}")
        if not callable(fn):
            raise ParameterTypeError(f"fn must be callable, got {quote(fn)}")
        return SampleLength(fn=fn)
    check_column(column)
    if column is not None:
        return SampleLength(column)
    if isinstance(sample, Mapping):
        counted = [key for key in sample if _lower(key) in COLUMNS and _is_integer(sample[key])]
        if len(counted) == 1:
            return SampleLength(counted[0])
        sized = [key for name in SIZED_COLUMNS for key in sample if _lower(key) == name and _is_sized(sample[key])]
        if sized and not counted:
            return SampleLength(sized[0])
    elif _is_sized(sample) and _is_numeric_sequence(sample):
        return SampleLength()
    raise ParameterError(f"what is the length of a sample? Give column or fn; it is {_describe(sample)}")


def check_column(column: Any) -> None:
    """Refuse what is neither None, a name nor a position."""
    if isinstance(column, bool) or not isinstance(column, (str, numbers.Integral, type(None))):
        raise ParameterTypeError(f"column must be a name or a position, got {quote(column)}")


def size_of(value: Any, what: str) -> int:
    """An integer as it is, else the size of its first dimension (of the second where the first is a batch of one).

    Example:
        >>> import torch
        >>> size_of(torch.zeros(9, 80), "x"), size_of(torch.zeros(1, 7), "x"), size_of(torch.tensor(4), "x")
        (9, 7, 4)
    """
    if _is_integer(value):
        return int(value)
    shape = getattr(value, "shape", None)
    if shape is not None and len(shape) > 1 and shape[0] == 1:
        return int(shape[1])
    if not _is_sized(value):
        hint = ": characters are not tokens, give fn" if isinstance(value, (str, bytes)) else ""
        raise ParameterTypeError(f"{what} is {quote(value, 40)} of type {type(value).__name__}, without a length{hint}")
    return len(value)


def _is_integer(value: Any) -> bool:
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_sized(value: Any) -> bool:
    if isinstance(value, (str, bytes, Mapping)) or getattr(value, "ndim", 1) == 0:
        return False
    return hasattr(value, "__len__")


def _is_numeric_sequence(sample: Any) -> bool:
    if hasattr(sample, "ndim") and hasattr(sample, "dtype"):
        return True
    return isinstance(sample, Sequence) and all(isinstance(item, numbers.Number) for item in sample[:2])


def _lower(key: Any) -> Any:
    return key.lower() if isinstance(key, str) else key


def _describe(sample: Any) -> str:
    if isinstance(sample, Mapping):
        keys = list(sample)[:20]
        return f"a {type(sample).__name__} with {', '.join(map(repr, keys)) or 'nothing'}"
    return f"{quote(sample, 40)} of type {type(sample).__name__}"
