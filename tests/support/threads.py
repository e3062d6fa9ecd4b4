"""Work in several threads at once."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def in_threads(work: Callable[[int], Any], num: int = 8, timeout: float = 120) -> list[Any]:
    """Runs `work(i)` in threads that start together; fails if one raises or does not end."""
    barrier, results, errors = threading.Barrier(num), [None] * num, []

    def run(i: int) -> None:
        try:
            barrier.wait(30)
            results[i] = work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(num)]
    interval, end = sys.getswitchinterval(), time.monotonic() + timeout
    sys.setswitchinterval(1e-4)  # more switches, so that a race would show
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0, end - time.monotonic()))
    finally:
        sys.setswitchinterval(interval)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    return results


@contextmanager
def locked_elsewhere(*locks: Any) -> Iterator[None]:
    """While another thread holds the locks."""
    holds, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        for lock in locks:
            lock.acquire()
        holds.set()
        may_end.wait(60)
        for lock in locks:
            lock.release()

    thread = threading.Thread(target=hold)
    thread.start()
    assert holds.wait(30)
    try:
        yield
    finally:
        may_end.set()
        thread.join()
