"""The rule that keeps TorchDynamo, the tracer of torch.compile, from tracing pycoll.

Dynamo cuts a compiled function where it calls pycoll (a graph break); the call then runs as without
torch.compile. Dynamo skips a package by a rule of ``torch._dynamo.trace_rules``. torch imports that
module with the first torch.compile: before pycoll, after it, or never. This module imports nothing
of torch. It adds the rule if that module is loaded, and otherwise watches imports until torch loads
it, and checks that it has an effect. docs/process-wide.md lists the tested versions.
"""

from __future__ import annotations

import importlib.machinery
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_RULES = "torch._dynamo.trace_rules"


def leave_pycoll_alone() -> None:
    """Add the rule now, or when torch imports the module that keeps the rules."""
    rules = sys.modules.get(_RULES)
    if rules is not None:
        _add_rule(rules)
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
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            run = loader.exec_module

            def run_and_add(module: ModuleType) -> None:
                run(module)
                _add_rule(module)

            loader.exec_module = run_and_add
        return spec


def _add_rule(rules: Any) -> None:
    try:
        rules.add("pycoll")
        if not rules.SKIP_DIRS_RE.match(__file__):
            raise RuntimeError("the rule has no effect")
    except Exception as error:  # torch's import must not fail by this
        warnings.warn(
            f"torch.compile traces pycoll, since this version of torch takes no rule: {error!r}",
            stacklevel=2,
        )
