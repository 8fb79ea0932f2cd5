"""Detect torch.compile: whether the process has compiled code, and a call before it gets any.

Compiled code reads the memory of parameters without asking their class or the hooks of modules. So
no step may be deferred while compiled code runs (deferred_step.py). TorchDynamo compiles a frame
when the frame runs for the first time, and calls the callbacks of ``torch._dynamo.callback`` before
that. Its ``reset()`` drops all compiled code and these callbacks. ``check`` is a part of the
self-test of deferred steps (deferred_parameter.py).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from pycoll.doors import expect

#: Bound methods to be called before the first frame is compiled.
_listeners: set[weakref.WeakMethod[Callable[[], None]]] = set()


def has_compiled() -> bool:
    """Whether TorchDynamo has compiled a frame of this process that may run again."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    if frames is None:
        return False
    return bool(frames.input_codes.seen)


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether torch.compile or torch.jit has made the module, or its call."""
    by_itself = getattr(module, "_compiled_call_impl", None) is not None
    return by_itself or isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_orig_mod")


def check() -> None:
    """Raise unless torch has the names that this module uses."""
    from torch._dynamo import convert_frame
    from torch._dynamo.callback import callback_handler

    expect(len(convert_frame.input_codes.seen) >= 0, "torch does not list compiled frames")
    expect(callable(callback_handler.register_start_callback), "torch takes no callback")
    expect(isinstance(callback_handler.start_callbacks, list), "torch lists no callbacks")
    expect(isinstance(torch.compiler._is_compiling_flag, bool), "torch has no flag for compiling")
    expect(hasattr(torch.nn.Module(), "_compiled_call_impl"), "modules do not tell if compiled")


def listen(before: Callable[[], None]) -> None:
    """Call the bound method ``before`` before TorchDynamo compiles a frame; held weakly.

    Repeat the call in each step: ``torch._dynamo.reset()`` drops the registration. Repeating it is
    cheap.
    """
    from torch._dynamo.callback import callback_handler

    _listeners.add(weakref.WeakMethod(before, _listeners.discard))
    if _tell not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_tell)


def _tell(*_: Any) -> None:
    # torch has already set its flag for compiling. Optimizers of torch choose other arithmetic by
    # that flag, so it is False while the listeners step parameters.
    compiler: Any = torch.compiler
    says, compiler._is_compiling_flag = compiler._is_compiling_flag, False
    try:
        for reference in list(_listeners):
            listener = reference()
            if listener is not None:
                listener()
    finally:
        compiler._is_compiling_flag = says
