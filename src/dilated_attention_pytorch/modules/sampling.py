"""The next token of each row from its logits: the likeliest, or one at random from a shaped distribution."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import check_flags, check_positive_int, finite_float


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Args:
        do_sample: draw at random; if False the likeliest token is taken, and no other option may be given.
        temperature: positive; logits are divided by it, so that less than 1 sharpens the distribution.
        top_k: only the k likeliest tokens may be drawn.
        top_p: above 0 and at most 1; only the fewest likeliest tokens whose probabilities, after temperature
            and top_k, sum to at least p may be drawn.
        seed: an integer, which each row joins with its index (see `row_seeds`), or one for each row, taken as
            they are. What a row draws depends on its own logits and seed alone, not on the other rows of the
            batch. None takes a seed from torch's global generator.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        check_flags(do_sample=self.do_sample)
        finite_float("temperature", self.temperature)
        given = [name for name in ("top_k", "top_p", "seed") if getattr(self, name) is not None]
        given += [] if self.temperature == 1.0 else ["temperature"]
        if given and not self.do_sample:
            raise ValueError(
                f"without do_sample the likeliest token is taken, got {', '.join(given)} as well"
            )
        _check_shaping(self.temperature, self.top_k, self.top_p)
        if self.seed is not None:
            seeds = [self.seed] if isinstance(self.seed, int) else self.seed
            if not isinstance(seeds, Sequence) or not all(type(seed) is int for seed in seeds):
                raise TypeError(f"seed must be an integer or one for each row, got {self.seed!r}")
            if any(seed < 0 for seed in seeds):  # Python's generator takes their absolute value
                raise ValueError(f"seed must not be negative, got {self.seed!r}")


class Sampler:
    """Chooses a token for each of `batch_size` rows, again and again: a call takes logits (b, vocab).

    Each call advances the random numbers of every row by one, also of rows whose token is not used.
    """

    def __init__(self, sampling: Sampling, batch_size: int) -> None:
        self.sampling = sampling
        self._generators: list[random.Random] = []
        if sampling.do_sample:
            seed = sampling.seed
            if seed is None:
                seed = int(torch.randint(2**62, ()).item())
            seeds = row_seeds(seed, batch_size) if isinstance(seed, int) else tuple(seed)
            if len(seeds) != batch_size:
                raise ValueError(f"seed must be one integer or {batch_size}, one a row, got {len(seeds)}")
            self._generators = [random.Random(each) for each in seeds]

    def __call__(self, logits: Tensor) -> Tensor:
        """logits (b, vocab) -> tokens (b,) int64."""
        if not self.sampling.do_sample:
            return likeliest(logits)
        uniforms = torch.tensor([each.random() for each in self._generators], dtype=torch.float64)
        how = self.sampling
        return draw(logits, uniforms, temperature=how.temperature, top_k=how.top_k, top_p=how.top_p)


def row_seeds(seed: int, batch_size: int) -> tuple[int, ...]:
    """The seeds of the rows of a batch: 64 bits of a hash of seed and row index."""
    digests = (hashlib.blake2b(f"{seed}:{row}".encode(), digest_size=8).digest() for row in range(batch_size))
    return tuple(int.from_bytes(digest, "little") for digest in digests)


def likeliest(logits: Tensor) -> Tensor:
    """logits (b, vocab) -> the tokens (b,) of the largest; the first of several equal ones."""
    _check_logits(logits)
    return logits.argmax(1)


def draw(
    logits: Tensor,
    uniforms: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Tensor:
    """Tokens (b,) of logits (b, vocab) at the places `uniforms` (b,), in [0, 1), of their distributions.

    The distribution function is that of `shape_probabilities`: a uniform random number gives a random token.
    """
    probabilities, tokens = shape_probabilities(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    if uniforms.shape != logits.shape[:1]:
        raise ValueError(f"uniforms must be (b,) = {tuple(logits.shape[:1])}, got {tuple(uniforms.shape)}")
    until = probabilities.cumsum(1)
    places = uniforms.to(until)[:, None] * until[:, -1:]
    found = torch.searchsorted(until, places, right=True)
    # Rounding may put a place at the very end, past the last token that can be drawn.
    last = (probabilities > 0).sum(1, keepdim=True) - 1
    return tokens.gather(1, torch.minimum(found, last))[:, 0]


def shape_probabilities(
    logits: Tensor, *, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> tuple[Tensor, Tensor]:
    """(probabilities (b, vocab), tokens (b, vocab)) of logits (b, vocab), the likeliest token first.

    Tokens that may not be drawn have probability 0; see `Sampling`. Of tokens equally likely the one of the
    smaller number comes first. In float64, where the device has it.
    """
    _check_logits(logits)
    _check_shaping(temperature, top_k, top_p)
    vocab = logits.shape[1]
    if top_k is not None and top_k > vocab:
        raise ValueError(f"top_k must be at most the number of tokens, got {top_k} and {vocab}")
    precise = torch.float32 if logits.device.type == "mps" else torch.float64
    shifted = logits.to(precise)
    shifted = (shifted - shifted.amax(1, keepdim=True)) / temperature
    ordered, tokens = shifted.sort(dim=1, descending=True, stable=True)
    if top_k is not None:
        ordered[:, top_k:] = -math.inf
    probabilities = ordered.softmax(1)
    if top_p is not None:
        before = probabilities.cumsum(1) - probabilities
        probabilities = probabilities.masked_fill(before >= top_p, 0.0)
        probabilities = probabilities / probabilities.sum(1, keepdim=True)
    return probabilities, tokens


def _check_shaping(temperature: float, top_k: int | None, top_p: float | None) -> None:
    if finite_float("temperature", temperature) <= 0:
        raise ValueError(
            f"temperature must be positive, got {temperature}; do_sample=False takes the likeliest"
        )
    if top_k is not None:
        check_positive_int("top_k", top_k)
    if top_p is not None and not 0 < finite_float("top_p", top_p) <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")


def _check_logits(logits: Tensor) -> None:
    if logits.dim() != 2 or 0 in logits.shape or not logits.is_floating_point():
        raise ValueError(
            f"logits must be floating-point (b, vocab), got {logits.dtype} {tuple(logits.shape)}"
        )
    largest = logits.amax(1)
    if not largest.isfinite().all():
        row = int(largest.isfinite().logical_not().nonzero()[0])
        raise ValueError(
            f"the largest logit of each row must be finite, got {largest[row].item()} in row {row}"
        )
