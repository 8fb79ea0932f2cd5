"""All values of a store: arrays and tables, each by its own arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pycoll.ps.shard_arrays import ArrayValues
from pycoll.ps.values.server_optimizers import Optimizer
from pycoll.ps.values.table_values import TableValue, TableValues

#: The rule of a table's parts; smaller numbers are rules of arrays.
TABLE = 3
#: The prefix of the names of tables, among those of keys.
TABLES = "\x01table "


class StoreValues:
    """The arithmetic of a store; see ``shard.Arithmetic``. Stateless."""

    def __init__(self) -> None:
        self._arrays = ArrayValues()
        self._tables = TableValues()

    def _of(self, rule: int) -> Any:
        return self._tables if rule & 0xFF == TABLE else self._arrays

    def load(self, rule: int, payload: Any) -> Any:
        """Return the value of a new part. Raises ValueError for a wrong payload."""
        return self._of(rule).load(rule, payload)

    def set_optimizer(self, rule: int, value: Any, form: Any) -> Any:
        """Return the value with an optimizer. ``form``: the optimizer in its serialized form.

        Values that no optimizer can step stay as they are. Raises ValueError for a wrong form.
        """
        return self._of(rule).set_optimizer(rule, value, Optimizer.from_bytes(form))

    def refusal(self, rule: int, value: Any, payload: Any) -> str:
        """Return why the payload does not fit this part, or an empty text."""
        text: str = self._of(rule).refusal(rule, value, payload)
        return text

    def apply(self, rule: int, value: Any, pushes: Sequence[Any], workers: int) -> Any:
        """Return the value after the pushes."""
        return self._of(rule).apply(rule, value, pushes, workers)

    def steps(self, value: Any) -> bool:
        """Return whether an optimizer steps the value."""
        return value.optimizer is not None

    def read(self, rule: int, value: Any, query: Any) -> Any:
        """Return the value as a payload. Raises ValueError for a wrong ``query``."""
        return self._of(rule).read(rule, value, query)

    def nbytes(self, value: Any) -> int:
        """Return the bytes that a value takes."""
        kind: Any = self._tables if isinstance(value, TableValue) else self._arrays
        count: int = kind.nbytes(value)
        return count

    def pieces(self, value: Any) -> Sequence[Any]:
        """Return payloads that hold all of the value."""
        kind: Any = self._tables if isinstance(value, TableValue) else self._arrays
        pieces: Sequence[Any] = kind.pieces(value)
        return pieces

    def join(self, rule: int, pieces: Sequence[Any]) -> Any:
        """Return the value from the payloads that ``pieces`` made."""
        return self._of(rule).join(rule, pieces)

    def restore(self, rule: int, value: Any, place: int, payload: Any) -> Any:
        """Return the value with one piece of a saved value. Raises ValueError for a wrong piece."""
        return self._of(rule).restore(rule, value, place, payload)
