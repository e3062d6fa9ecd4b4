"""One kernel call's worth of rows and heads, addressed by strides: plain integers, no copies."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .heads import HeadBox

Origin = tuple[int, int, int]  # (batch, time, head) at which a tensor starts
WHOLE: Origin = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class Tile:
    """Query rows x key rows of one branch, for a box of heads in `segments` equally spaced segments.

    Row `j` of segment `s` for a head with offset `c` is position `start + s * period + c + j * rate`.
    `opens_*`: no earlier tile of the branch touched these query (or key) rows. `first_for_*`: no earlier
    branch touched these query (or key) heads. Both together: write instead of merge or add.
    """

    index: int
    branch: int
    batch: int
    num_batch: int
    start: int
    segments: int
    period: int
    rate: int
    heads: HeadBox
    q_first: int
    q_count: int
    k_first: int
    k_count: int
    is_causal: bool
    phantom: int
    first_for_queries: bool
    first_for_keys: bool
    opens_queries: bool
    opens_keys: bool

    def q_shape(self, d: int) -> tuple[int, int, int, int]:
        """Packed (batch x segments, heads, rows, d) of the queries, as the kernels take it."""
        return self.num_batch * self.segments, self.heads.num_heads, self.q_count, d

    def k_shape(self, d: int) -> tuple[int, int, int, int]:
        return self.num_batch * self.segments, self.heads.num_units, self.k_count, d

    @property
    def first_key(self) -> int:
        """The position of the first key row of the first head."""
        return self.start + self.heads.first.row + self.k_first * self.rate

    @property
    def num_pairs(self) -> int:
        """Query-key pairs that are scored, over all heads and batches."""
        per_head = self.q_count * (self.q_count + 1) // 2 if self.is_causal else self.q_count * self.k_count
        return self.num_batch * self.segments * self.heads.num_heads * per_head

    def query_view(self, x: Tensor, origin: Origin = WHOLE) -> Tensor:
        """The tile's query rows in `x` (b, n, h, ...): (batch, segments, *axes, group, rows, ...)."""
        s_batch, s_time, s_head, *rest = x.stride()
        box = self.heads
        offset = (
            x.storage_offset()
            + (self.batch - origin[0]) * s_batch
            + (self.start + box.first.row + self.q_first * self.rate - origin[1]) * s_time
            + (box.first.head - origin[2]) * s_head
        )
        size = [self.num_batch, self.segments, *(a.size for a in box.axes), box.group, self.q_count]
        stride = [s_batch, self.period * s_time, *(a.head * s_head + a.row * s_time for a in box.axes)]
        stride += [box.group_step * s_head, self.rate * s_time]
        return x.as_strided(size + list(x.shape[3:]), stride + rest, offset)

    def key_view(self, x: Tensor, origin: Origin = WHOLE) -> Tensor:
        """The tile's key rows in `x` (b, n, h_kv, ...): (batch, segments, *axes, rows, ...)."""
        s_batch, s_time, s_head, *rest = x.stride()
        box = self.heads
        offset = (
            x.storage_offset()
            + (self.batch - origin[0]) * s_batch
            + (self.start + box.first.row + self.k_first * self.rate - origin[1]) * s_time
            + (box.first.kv - origin[2]) * s_head
        )
        size = [self.num_batch, self.segments, *(a.size for a in box.axes), self.k_count]
        stride = [s_batch, self.period * s_time, *(a.kv * s_head + a.row * s_time for a in box.axes)]
        return x.as_strided(size + list(x.shape[3:]), [*stride, self.rate * s_time, *rest], offset)

    def __str__(self) -> str:
        first = self.start + self.heads.first.row
        causal = " causal" if self.is_causal else ""
        phantom = f" +{self.phantom} phantom" if self.phantom else ""
        return (
            f"branch {self.branch}  batch {self.batch}+{self.num_batch}  "
            f"{self.segments} segment(s) from {first} every {self.period}  rate {self.rate}  "
            f"heads {self.heads.first.head}+{self.heads.num_heads}  "
            f"queries {self.q_first}+{self.q_count} x keys {self.k_first}+{self.k_count}{causal}{phantom}"
        )
