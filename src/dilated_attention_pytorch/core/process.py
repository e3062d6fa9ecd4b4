"""State of one process: its copies share it, a forked child starts it empty, what is idle can be freed."""

from __future__ import annotations

import gc
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any, ClassVar, TypeVar

import torch

from .host_memory import is_out_of_memory, out_of_memory

LOGGER = logging.getLogger("dilated_attention_pytorch")
LOCK = threading.RLock()  # of what is made once; a forked child has another
_T = TypeVar("_T")


class PerProcess:
    """What outlives a call and is shared by threads under `_lock`.

    A pickle carries the arguments named by `SETTINGS`, with which another process makes its own.
    """

    SETTINGS: ClassVar[tuple[str, ...]] = ()
    _found_by: Callable[[], Any] | None = None  # gives this one in this process, and that of any other there

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: hashes, `to` methods and finalisers may run under it
        self._start_clean()
        with LOCK:
            _INSTANCES.add(self)

    def _start_clean(self) -> None:
        """Forgets everything but the settings."""

    def release_idle(self) -> int:
        """Frees what can be had again; returns how many bytes of host memory that were."""
        return 0

    def __deepcopy__(self: _T, *_: Any) -> _T:
        return self

    __copy__ = __deepcopy__

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        own = partial(type(self), **{name: getattr(self, name) for name in self.SETTINGS})
        return self._found_by or own, ()


_INSTANCES: weakref.WeakSet[PerProcess] = weakref.WeakSet()
_P = TypeVar("_P", bound=PerProcess)


def once(make: Callable[[], _P]) -> Callable[[], _P]:
    """The function, which makes its result in the first call; all later ones, of any thread, get the same."""
    made: list[_P] = []

    @wraps(make)
    def find() -> _P:
        with LOCK:
            if not made:
                made.append(make())
                made[0]._found_by = find
        return made[0]

    return find


def release_idle_memory() -> int:
    """The emergency cleanup: frees what is idle in all pools and torch's caches; returns the pools' bytes."""
    with LOCK:  # a set that grows cannot be iterated
        instances = list(_INSTANCES)
    gc.collect()
    freed = sum(each.release_idle() for each in instances)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    LOGGER.debug("out of memory: %d idle bytes freed", freed)
    return freed


def with_relief(tries: Iterable[Callable[[], _T]], device: torch.device, tried: str = "") -> _T:
    """The result of the first try that does not run out of memory; after each that does, what is idle goes.

    The error at the end says what was `tried`.
    """
    for attempt in tries:
        try:
            return attempt()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            failure = error.with_traceback(None)  # whose frames would keep the tensors of the callers
        release_idle_memory()
    raise out_of_memory(failure, device, f"after all idle buffers were freed{tried}") from failure


def _start_clean_after_fork() -> None:
    """The locks may be held by threads that do not exist here, and the memory is the parent's."""
    global LOCK
    LOCK = threading.RLock()
    for each in list(_INSTANCES):
        each._lock = threading.RLock()
        each._start_clean()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_clean_after_fork)
