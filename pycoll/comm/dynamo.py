"""The rule that keeps TorchDynamo, the tracer of torch.compile, from tracing pycoll.

Dynamo cuts a compiled function where it calls pycoll (a graph break); the call then runs as without
torch.compile. Dynamo skips a package by a rule of ``torch._dynamo.trace_rules``. torch imports that
module with the first torch.compile: before pycoll, after it, or never. This module imports nothing
of torch. It adds the rule if that module is loaded, and otherwise watches imports until torch loads
it. The rule is added through a door, which checks that it has an effect; docs/process-wide.md
lists the tested versions. With ``PYCOLL_COMPILER_RULE=0`` nothing is added.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pycoll.doors import Door

_RULES = "torch._dynamo.trace_rules"


def leave_pycoll_alone() -> None:
    """Add the rule now, or when torch imports the module that keeps the rules."""
    if _RULES in sys.modules:
        _open_door()
    else:
        sys.meta_path.insert(0, _Watch())


class _Watch:
    """An import hook that adds the rule at the end of the import of ``_RULES``.

    It finds no other module.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of ``_RULES`` with the hook in its loader, and None for other modules.

        importlib calls this for each module that is not imported yet.
        """
        if fullname != _RULES:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        if not _door().is_wanted():
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            run = loader.exec_module

            def run_and_add(module: ModuleType) -> None:
                run(module)
                _open_door()

            loader.exec_module = run_and_add
        return spec


@functools.cache
def _door() -> Door:
    from pycoll.doors import TORCH_TESTED, Door

    return Door(
        "rules of pycoll for TorchDynamo",
        _add_rule,
        "torch.compile traces pycoll.",
        "torch",
        TORCH_TESTED,
        "compiler_rule",
    )


def _open_door() -> None:
    # Where warnings are errors, imports do not fail by the warning of the door.
    with contextlib.suppress(RuntimeWarning):
        _door().is_open()


def _add_rule() -> None:
    """Add the rule. Raise unless it has an effect."""
    rules: Any = sys.modules[_RULES]
    rules.add("pycoll")
    if not rules.SKIP_DIRS_RE.match(__file__):
        raise RuntimeError("the rule has no effect")
