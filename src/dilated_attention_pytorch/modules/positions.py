"""Positions of queries and keys, rotary (arXiv:2104.09864) or XPOS (arXiv:2212.10554)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..checks import check_positive, check_positive_int, one_of, whole_numbers
from .call_checks import check_positions, require

ENCODINGS = ("rotary", "xpos")
DEFAULT_ROTARY_BASE = 10000.0
DEFAULT_XPOS_SCALE_BASE = 512.0


def make_position_encoding(
    kind: str | None,
    head_dim: int,
    segment_lengths: Sequence[int] | None = None,
    *,
    rotary_base: float = DEFAULT_ROTARY_BASE,
    xpos_scale_base: float = DEFAULT_XPOS_SCALE_BASE,
) -> RotaryEmbedding | None:
    """The encoding of a kind, None, "rotary" or "xpos"; an option that the kind does not read is refused."""
    if kind is not None:
        one_of("position_encoding", kind, ENCODINGS)
    check_positive(rotary_base=rotary_base, xpos_scale_base=xpos_scale_base)
    if kind is None and rotary_base != DEFAULT_ROTARY_BASE:
        raise ValueError(f"rotary_base is for a position encoding, got {rotary_base} and none")
    if kind != "xpos" and xpos_scale_base != DEFAULT_XPOS_SCALE_BASE:
        given = f"{xpos_scale_base} and {kind!r}"
        raise ValueError(f"xpos_scale_base is for position_encoding 'xpos', got {given}")
    if kind == "xpos":
        return XPos(head_dim, segment_lengths, rotary_base, xpos_scale_base)
    return None if kind is None else RotaryEmbedding(head_dim, rotary_base)


class RotaryEmbedding(nn.Module):
    """Turns features (2i, 2i + 1) of queries and keys by position * base ** (-2i / d), so that scores depend
    on the difference of positions only.

    Args:
        head_dim: d, even.
        base: longest wavelength over 2 pi.

    Angles are computed in float64, so that positions of many millions stay exact; the turn itself in float32,
    or float64 for float64. Pairs are neighbours, as in torchscale, not halves as in Llama. There are no
    parameters and no tables.
    """

    def __init__(self, head_dim: int, base: float = DEFAULT_ROTARY_BASE) -> None:
        super().__init__()
        check_positive_int("head_dim", head_dim)
        if head_dim % 2:
            raise ValueError(f"encodings turn pairs of features: head_dim must be even, got {head_dim}")
        check_positive(base=base)
        self.head_dim, self.base = head_dim, float(base)

    def forward(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """q (b, n, h, d), k (b, n, h_kv, d) and positions (n,) or (b, n) integers -> q and k, encoded."""
        *_, cos, sin = self._turns(q, k, positions)
        return _turn(q, cos, sin), _turn(k, cos, sin)

    def _turns(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Positions as int64, the even features, and of every angle cosine and sine, (b, n, 1, d / 2)."""
        for name, x in (("q", q), ("k", k)):
            if x.dim() != 4 or x.shape[3] != self.head_dim:
                rule = f"{name} must have the shape (b, n, h, d) with d {self.head_dim}"
                raise ValueError(f"{rule}, got {tuple(x.shape)}")
        check_positions(positions, *q.shape[:2])
        # Apple's GPUs have no float64.
        positions = positions.to("cpu" if positions.device.type == "mps" else positions.device, torch.int64)
        pairs = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=positions.device)
        angles = positions.double()[..., None, None] * self.base ** -(pairs / self.head_dim)
        return positions, pairs, angles.cos(), angles.sin()

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, base={self.base}"


class XPos(RotaryEmbedding):
    """`RotaryEmbedding` whose scores also fade with the distance: those of features (2i, 2i + 1) by
    zeta_i ** ((query position - key position) / scale_base), zeta_i = (2i + 0.4 d) / (1.4 d).

    Queries are multiplied by zeta ** (position / scale_base) and keys divided by it, as in torchscale. These
    factors stay bounded: positions count anew after each common multiple of the segment lengths, which
    changes no score, for no segment lies in two of its periods. Where a period is so long that the factors
    would leave the range of the dtype, positions beyond that are refused. Made for causal attention: scores
    of keys after the query grow with the distance.

    Args:
        head_dim, base: as in `RotaryEmbedding`.
        segment_lengths: of the attention; None if it is not bounded by segments.
        scale_base: positions over which the factor falls to zeta.
    """

    def __init__(
        self,
        head_dim: int,
        segment_lengths: Sequence[int] | None = None,
        base: float = DEFAULT_ROTARY_BASE,
        scale_base: float = DEFAULT_XPOS_SCALE_BASE,
    ) -> None:
        super().__init__(head_dim, base)
        check_positive(xpos_scale_base=scale_base)
        self.scale_base = float(scale_base)
        period = None
        if segment_lengths is not None:
            period = math.lcm(*whole_numbers("segment_lengths", segment_lengths, None, 2**62 - 1, least=1))
        self.period = None if period is None or period >= 2**62 else period  # or no position reaches it

    def forward(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """As `RotaryEmbedding.forward`, and scaled."""
        positions, pairs, cos, sin = self._turns(q, k, positions)
        factor = self._factors(positions, pairs, q.dtype)
        return _turn(q, cos * factor, sin * factor), _turn(k, cos / factor, sin / factor)

    def check_given(self, positions: Tensor, own: Tensor) -> None:
        """Raises where positions of the user's, instead of the tokens' `own`, cannot be encoded."""
        if self.period is None:
            return
        message = (
            f"positions must lie in one period of xpos, 0 .. {self.period - 1}, or differ from those of the "
            "tokens by multiples of it, or segments would lie in two periods; got others"
        )
        inside = ((positions >= 0) & (positions < self.period)).all()
        require(inside | ((positions - own) % self.period == 0).all(), message)

    def reach(self, dtype: torch.dtype) -> int:
        """Positions whose factors, and their inverses, have a finite square in `dtype`."""
        exponent = math.log(torch.finfo(dtype).max) / 2 / math.log(1.4 / 0.4)  # of the smallest zeta
        return int(2 * exponent * self.scale_base)

    def _factors(self, positions: Tensor, pairs: Tensor, dtype: torch.dtype) -> Tensor:
        """Of queries, float64 (n, 1, d / 2) or (b, n, 1, d / 2); keys are divided by them."""
        reach = self.reach(dtype)
        local = positions if self.period is None else positions % self.period
        if self.period is None or self.period > reach:
            period = "no period" if self.period is None else f"a period of {self.period}"
            message = (
                f"xpos factors of {dtype} reach over {reach} positions (a larger xpos_scale_base or a wider "
                f"dtype reaches further, and segment lengths with a smaller common multiple repeat "
                f"earlier), got a position beyond, with {period}"
            )
            require(((local >= 0) & (local < reach)).all(), message)
        half = min(reach, self.period or reach) // 2
        zeta = (pairs + 0.4 * self.head_dim) / (1.4 * self.head_dim)
        exponents: Tensor = (local - half).double() / self.scale_base
        return zeta ** exponents[..., None, None]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scale_base={self.scale_base}, period={self.period}"


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (each.to(x.device, dtype) for each in (cos, sin))
    pairs = x.to(dtype).unflatten(-1, (-1, 2))  # type: ignore[no-untyped-call]
    # Complex numbers are several times as fast on a CPU; compilers fuse real ones, and not these.
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        whole = pairs if _views_as_complex(pairs) else pairs.contiguous()
        turned = torch.view_as_real(torch.view_as_complex(whole) * torch.complex(cos, sin))
    else:
        even, odd = pairs.unbind(-1)
        turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1)
    return turned.flatten(-2).to(x.dtype)


def _views_as_complex(pairs: Tensor) -> bool:
    *others, last = pairs.stride()
    return last == 1 and not any(stride % 2 for stride in (*others, pairs.storage_offset()))
