"""The door to torch.compile: whether there is compiled code here, and a word before there is.

Compiled code reads the memory of parameters without asking their class or a module's hooks, so no
step may be to come while any of it runs (overlap.py). TorchDynamo compiles a frame when it runs for
the first time; before that it calls the callbacks of ``torch._dynamo.callback``. Its ``reset()``
forgets all compiled code and these callbacks. Tested with torch 2.13 and 2.14; where a version has
no such names, ``has_compiled`` is True, so that no step waits.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

#: Bound methods to be called before the first frame is compiled.
_listeners: set[weakref.WeakMethod[Callable[[], None]]] = set()


def has_compiled() -> bool:
    """Whether TorchDynamo has compiled a frame of this process that may run again."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    if frames is None:
        return False
    codes = getattr(frames, "input_codes", None)
    return codes is None or bool(getattr(codes, "seen", True))


def listen(before: Callable[[], None]) -> None:
    """Call the bound method ``before``, which is held weakly, before a frame is compiled.

    Cheap to repeat, as has to be done after ``torch._dynamo.reset()``.
    """
    from torch._dynamo.callback import callback_handler

    _listeners.add(weakref.WeakMethod(before, _listeners.discard))
    if _tell not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_tell)


def _tell(*_: Any) -> None:
    # torch says already that it compiles, by which its optimizers choose other arithmetic.
    compiler: Any = torch.compiler
    says, compiler._is_compiling_flag = getattr(compiler, "_is_compiling_flag", False), False
    try:
        for reference in list(_listeners):
            listener = reference()
            if listener is not None:
                listener()
    finally:
        compiler._is_compiling_flag = says
