"""Tokens one after the other: the choice of the next token of each row, and the loop of generation."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from ..checks import check_flags, check_positive_int, finite_float, whole_numbers

if TYPE_CHECKING:
    from .longnet import LongNetLM

_Module = TypeVar("_Module", bound=nn.Module)


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Args:
        do_sample: draw at random; if False the likeliest token is taken, and no other option may be given.
        temperature: divides the logits, so that less than 1 sharpens the distribution.
        top_k: only the k likeliest tokens may be drawn.
        top_p: only the fewest likeliest tokens whose probabilities, after temperature and top_k, sum to at
            least p may be drawn.
        seed: an integer, which each row joins with its index (see `row_seeds`), or one for each row, so that
            a row draws the same whatever its neighbours. None takes one from torch's global generator.
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
            rule = "without do_sample the likeliest token is taken"
            raise ValueError(f"{rule}, got {', '.join(given)} as well")
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
            seed = int(torch.randint(2**62, ()).item()) if sampling.seed is None else sampling.seed
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


def draw(logits: Tensor, uniforms: Tensor, **shaping: Any) -> Tensor:
    """Tokens (b,) of logits (b, vocab) at the places `uniforms` (b,), in [0, 1), of their distributions.

    The distribution function is that of `shape_probabilities`, whose options `shaping` are: a uniform random
    number gives a random token.
    """
    probabilities, tokens = shape_probabilities(logits, **shaping)
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
    shifted = logits.to(torch.float32 if logits.device.type == "mps" else torch.float64)
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
        hint = "do_sample=False takes the likeliest"
        raise ValueError(f"temperature must be positive, got {temperature}; {hint}")
    if top_k is not None:
        check_positive_int("top_k", top_k)
    if top_p is not None and not 0 < finite_float("top_p", top_p) <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")


def _check_logits(logits: Tensor) -> None:
    if logits.dim() != 2 or 0 in logits.shape or not logits.is_floating_point():
        kind = f"{logits.dtype} {tuple(logits.shape)}"
        raise ValueError(f"logits must be floating-point (b, vocab), got {kind}")
    for row, largest in enumerate(logits.amax(1).tolist()):
        if not math.isfinite(largest):
            raise ValueError(f"the largest logit of each row must be finite, got {largest} in row {row}")


class Generation:
    """One call of `LongNetLM.generate` or `stream`: checks its arguments; iterating gives tokens (b,).

    It fills the caches with the prompt, then chooses and feeds back one token at a time.
    """

    def __init__(
        self,
        model: LongNetLM,
        prompt: Tensor,
        max_new_tokens: int,
        sampling: Sampling,
        lengths: Tensor | Sequence[int] | None = None,
        stop_tokens: Iterable[int] = (),
        prefill_chunk: int | None = None,
    ) -> None:
        model.check_tokens(prompt)
        check_positive_int("max_new_tokens", max_new_tokens)
        if prefill_chunk is not None:
            check_positive_int("prefill_chunk", prefill_chunk)
        vocab_size = model.config.vocab_size
        if sampling.top_k is not None and sampling.top_k > vocab_size:
            raise ValueError(f"top_k must be at most vocab_size, got {sampling.top_k} and {vocab_size}")
        self.model, self.prompt, self.max_new_tokens = model, prompt, max_new_tokens
        b, n = prompt.shape
        self.lengths = [n] * b if lengths is None else whole_numbers("lengths", lengths, b, n, least=1)
        self.stop_tokens = _check_stop_tokens(stop_tokens, vocab_size)
        self.prefill_chunk = prefill_chunk or n
        self.sampler = Sampler(sampling, b)

    def __iter__(self) -> Iterator[Tensor]:
        """Tokens (b,) until all rows have stopped or are full; pad_token in rows that have stopped."""
        model, b = self.model, self.prompt.shape[0]
        stops = torch.tensor(self.stop_tokens, dtype=torch.int64, device=self.prompt.device)
        running = torch.ones(b, dtype=torch.bool, device=self.prompt.device)
        caches, twin = model.make_caches(b), in_evaluation(model)
        logits = self._prefill(twin, caches)
        for step in range(self.max_new_tokens):
            tokens = self.sampler(logits).masked_fill(~running, model.config.pad_token)
            running = running & ~torch.isin(tokens, stops)
            yield tokens.clone()  # the caller may write to it
            reads = [int(row) for row in running.tolist()]  # a row that has stopped reads nothing more
            if step + 1 == self.max_new_tokens or not any(reads):
                return
            lengths = None if all(reads) else torch.tensor(reads)
            with torch.no_grad():
                logits = twin.logits(twin.features(tokens[:, None], caches=caches, lengths=lengths)[:, 0])

    @torch.no_grad()
    def _prefill(self, model: LongNetLM, caches: Any) -> Tensor:
        """Logits (b, vocab) after the last token of each row."""
        longest, is_ragged = max(self.lengths), len(set(self.lengths)) > 1
        last: dict[int, Tensor] = {}
        for start in range(0, longest, self.prefill_chunk):
            part = self.prompt[:, start : min(start + self.prefill_chunk, longest)]
            m = part.shape[1]
            counts = torch.tensor([min(max(length - start, 0), m) for length in self.lengths])
            states = model.features(part, caches=caches, lengths=counts if is_ragged else None)
            for row, length in enumerate(self.lengths):
                if start < length <= start + m:
                    last[row] = states[row, length - 1 - start].clone()
        return model.logits(torch.stack([last[row] for row in range(len(self.lengths))]))

    def join(self, new: list[Tensor]) -> Tensor:
        """Each row's prompt and, right behind its last token, the new ones: (b, n + new), padded after."""
        b, n = self.prompt.shape
        lengths = torch.tensor(self.lengths, device=self.prompt.device)[:, None]
        out = self.prompt.new_full((b, n + len(new)), self.model.config.pad_token)
        places = torch.arange(n + len(new), device=out.device)
        out[:, :n] = torch.where(places[:n] < lengths, self.prompt, out[:, :n])
        return out.scatter_(1, lengths + places[: len(new)], torch.stack(new, 1))


def in_evaluation(model: _Module) -> _Module:
    """The modules of `model` in evaluation mode, as new ones that share its parameters, buffers and hooks.

    If the mode of the model were switched, other threads that train it or generate with it would see that. A
    forward that `nn.Module.compile` compiled is that of the old module, so the new one runs uncompiled.
    """
    twins: dict[nn.Module, nn.Module] = {}

    def twin(module: nn.Module) -> nn.Module:
        if module not in twins:
            twins[module] = made = object.__new__(type(module))
            made.__dict__.update(module.__dict__, training=False, _compiled_call_impl=None)
            made.__dict__["_modules"] = {
                name: None if part is None else twin(part) for name, part in module._modules.items()
            }
        return twins[module]

    made = twin(model)
    assert isinstance(made, type(model))
    return made


def _check_stop_tokens(stop_tokens: Iterable[int], vocab_size: int) -> list[int]:
    # Once: an iterator has its tokens to give a single time.
    tokens: list[Any] = list(stop_tokens) if isinstance(stop_tokens, Iterable) else [None]
    if isinstance(stop_tokens, str) or not all(type(token) is int for token in tokens):
        raise TypeError(f"stop_tokens must be a collection of integers, got {stop_tokens!r}")
    if outside := sorted(token for token in tokens if not 0 <= token < vocab_size):
        raise ValueError(f"stop_tokens must be from 0 to vocab_size - 1 = {vocab_size - 1}, got {outside}")
    return tokens
