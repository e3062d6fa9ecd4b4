"""The sizes of an attention call."""

from __future__ import annotations

from typing import Literal, NamedTuple

Pass = Literal["forward", "backward"]


class Shape(NamedTuple):
    """Sizes of a call: q is (b, n, h, d), k and v are (b, n, h_kv, d)."""

    b: int
    n: int
    h: int
    h_kv: int
    d: int
