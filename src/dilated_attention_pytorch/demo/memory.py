"""The peak memory of a call in this process, from the kernel's books."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from ..bench.measure import NotMeasurableError, read_status, reset_peak_memory


def why_no_peaks() -> str | None:
    """Why peaks cannot be measured here; None if they can."""
    try:
        reset_peak_memory()
        read_status("VmHWM")
    except NotMeasurableError as error:
        return str(error)
    return None


def peak_of(call: Callable[[], object]) -> int | None:
    """Runs a call; the bytes that it held at most, beyond what was there before. None: not measurable."""
    _return_free_memory()
    try:
        before = reset_peak_memory()
    except NotMeasurableError:
        call()
        return None
    call()
    return max(0, read_status("VmHWM") - before)


def _return_free_memory() -> None:
    """Freed memory that the C library keeps would count as there before, and hide what is taken from it."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):  # of glibc alone; other libraries keep little
        return
