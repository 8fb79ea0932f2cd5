"""The terms of a table, and the initial elements of its rows."""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pycoll.arrays.hashes import hashes
from pycoll.errors import InvalidArgumentError
from pycoll.ps.messages import PART_BYTES_MAX
from pycoll.types import ITEM_BYTES, DType, numpy_dtype
from pycoll.untrusted import json_object, read_json

Array = npt.NDArray[Any]

#: The types of tables, and those of them that optimizers can step.
TABLE_TYPES = (DType.INT32, DType.INT64, DType.FLOAT32, DType.FLOAT64)
FRACTIONS = (DType.FLOAT32, DType.FLOAT64)
#: A table without a number of rows has ids below this one.
IDS_END = 1 << 62
_FACTS = {"dtype": int, "rows": int, "dim": int, "init": str, "seed": int}
_FORMS = ("zeros", "normal", "uniform")
#: The elements that one step of ``first_rows`` makes, which bounds its temporary memory.
_ROWS_AT_ONCE = 1 << 19


class TableTerms(NamedTuple):
    """The terms of a table. ``dim``: the elements of a row.

    ``rows``: their number, or -1 for a table that makes them on first use. ``init``: the form and
    scale of first rows as `read_init` reads them. ``seed``: of their elements.
    """

    dtype: int
    rows: int
    dim: int
    init: str
    seed: int

    @property
    def end(self) -> int:
        """The first id that is too large."""
        return IDS_END if self.rows < 0 else self.rows

    @property
    def row_bytes(self) -> int:
        """The bytes of a row."""
        return self.dim * ITEM_BYTES[self.dtype]

    @property
    def rows_of_message(self) -> int:
        """How many rows, with their ids, a message holds at most."""
        return PART_BYTES_MAX // (8 + self.row_bytes)

    def to_text(self) -> str:
        """Return the form that ``from_text`` reads."""
        return json.dumps(self._asdict())

    @classmethod
    def from_text(cls, text: str | bytes) -> TableTerms:
        """Read terms. Raises ValueError for any other text."""
        facts = json_object(read_json(text), _FACTS)
        rows = facts["rows"]
        return check_table_terms(
            *(facts["dtype"], None if rows == -1 else rows, facts["dim"], facts["init"]),
            facts["seed"],
        )


def _whole(name: str, given: Any, low: int, high: int) -> int:
    is_whole = isinstance(given, int | np.integer) and not isinstance(given, bool)
    if not is_whole or not low <= given <= high:
        raise InvalidArgumentError(
            f"{name} is {given!r}: expected a whole number from {low} to {high}"
        )
    return int(given)


def check_table_terms(dtype: int, rows: Any, dim: Any, init: Any, seed: Any) -> TableTerms:
    """Return the terms of arguments. Raises InvalidArgumentError that names the wrong one."""
    if dtype not in TABLE_TYPES:
        words = ", ".join(one.word for one in TABLE_TYPES)
        raise InvalidArgumentError(f"dtype {dtype} of a table: expected one of {words}")
    most = (PART_BYTES_MAX - 8) // ITEM_BYTES[dtype]
    columns = _whole("dim", dim, 1, most)
    count = -1 if rows is None else _whole("rows", rows, 1, IDS_END)
    form, scale = read_init(init)
    if form != "zeros" and dtype not in FRACTIONS:
        raise InvalidArgumentError(f'init is {init!r} for a table of whole numbers: pass "zeros"')
    text = form if form == "zeros" else f"{form}:{scale!r}"
    return TableTerms(int(dtype), count, columns, text, _whole("seed", seed, 0, IDS_END))


def read_init(init: Any) -> tuple[str, float]:
    """Return the form of first rows and its scale. Raises InvalidArgumentError for others."""
    form, colon, rest = init.partition(":") if isinstance(init, str) else ("", "", "")
    try:
        scale = float(rest) if colon else 0.0
    except ValueError:
        scale = math.nan
    fits = (form == "zeros") != bool(colon)
    if form not in _FORMS or not fits or not 0 <= scale < math.inf:
        raise InvalidArgumentError(
            f'init is {init!r}: expected "zeros", "normal:DEVIATION" or "uniform:BOUND"'
        )
    return form, scale


def first_rows(terms: TableTerms, ids: npt.NDArray[np.int64]) -> Array:
    """Return the rows before any push: a function of seed, id and column alone.

    The elements come from hashes by whole numbers and one multiplication, so every server and every
    restart has the same bits. "normal" adds 12 uniform numbers: its tails end at 6 deviations.
    """
    made: Array = np.zeros((len(ids), terms.dim), numpy_dtype(terms.dtype))
    form, scale = read_init(terms.init)
    if form == "zeros" or not scale:
        return made
    rows = hashes(ids) ^ hashes(np.array([terms.seed]))
    columns = hashes(np.arange(1, terms.dim + 1))
    step = max(1, _ROWS_AT_ONCE // terms.dim)
    for begin in range(0, len(ids), step):
        seeds = hashes(rows[begin : begin + step])[:, None] ^ columns
        if form == "uniform":
            # 53 bits, as a number from -1 to 1 that is never 0.
            whole = (hashes(seeds) >> np.uint64(11)).astype(np.float64)
            made[begin : begin + step] = (whole * 2 + 1 - 2.0**53) * (scale * 2.0**-53)
        else:
            total = np.zeros(seeds.shape, np.int64)
            for turn in range(3):
                words = hashes(seeds + np.uint64(turn))
                for shift in range(0, 64, 16):
                    total += ((words >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int64)
            # A uniform number of 16 bits has the mean 32767.5 and the variance 65535 * 65537 / 12.
            made[begin : begin + step] = (total - 393210) * (scale / math.sqrt(65535 * 65537))
    return made
