"""What `torch.compile` must not look into, said without importing the compiler: that takes seconds.

`torch.compiler.disable` and `assume_constant_result` import it when they decorate. These set the same marks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """The function, which runs as it is in the midst of compiled code, as do those that it calls."""
    disabled: Callable[..., Any] | None = None

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if disabled is None and "torch._dynamo" in sys.modules:  # else nothing can be compiled yet
            disabled = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return (disabled or function)(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return cast(Function, call)


def remembered(function: Function) -> Function:
    """`lru_cache` by values and their types, which compilers do not trace: they trace the function."""
    known = lru_cache(maxsize=1024, typed=True)(function)

    @wraps(function)
    def call(*args: Any) -> Any:
        return function(*args) if torch.compiler.is_compiling() else known(*args)

    return cast(Function, call)


def constant_result(function: Function) -> Function:
    """The function, whose result compiled code takes as a constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
