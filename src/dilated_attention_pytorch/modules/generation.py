"""The loop of generation: fill the caches with the prompt, then choose and feed back one token at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..checks import whole_numbers
from ..core.blocks import check_positive_int
from .sampling import Sampler, Sampling

if TYPE_CHECKING:
    from .longnet import LongNetLM


class Generation:
    """One call of `LongNetLM.generate` or `stream`: checks its arguments; iterating gives tokens (b,)."""

    def __init__(
        self,
        model: LongNetLM,
        prompt: Tensor,
        max_new_tokens: int,
        sampling: Sampling,
        *,
        lengths: Tensor | Sequence[int] | None = None,
        stop_tokens: Collection[int] = (),
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
        stops = torch.tensor(sorted(self.stop_tokens), dtype=torch.int64, device=self.prompt.device)
        running = torch.ones(b, dtype=torch.bool, device=self.prompt.device)
        caches = model.make_caches(b)
        logits = self._prefill(caches)
        for step in range(self.max_new_tokens):
            tokens = self.sampler(logits).masked_fill(~running, model.config.pad_token)
            running = running & ~torch.isin(tokens, stops)
            yield tokens.clone()  # the caller may write to it
            reads = [int(row) for row in running.tolist()]  # a row that has stopped reads nothing more
            if step + 1 == self.max_new_tokens or not any(reads):
                return
            lengths = None if all(reads) else torch.tensor(reads)
            with evaluating(model):
                logits = model.logits(model.features(tokens[:, None], caches=caches, lengths=lengths)[:, 0])

    def _prefill(self, caches: Any) -> Tensor:
        """Logits (b, vocab) after the last token of each row."""
        longest, is_ragged = max(self.lengths), len(set(self.lengths)) > 1
        last: dict[int, Tensor] = {}
        with evaluating(self.model):
            for start in range(0, longest, self.prefill_chunk):
                part = self.prompt[:, start : min(start + self.prefill_chunk, longest)]
                m = part.shape[1]
                counts = torch.tensor([min(max(length - start, 0), m) for length in self.lengths])
                real = counts if is_ragged else None
                states = self.model.features(part, caches=caches, lengths=real)
                for row, length in enumerate(self.lengths):
                    if start < length <= start + m:
                        last[row] = states[row, length - 1 - start].clone()
            return self.model.logits(torch.stack([last[row] for row in range(len(self.lengths))]))

    def join(self, new: list[Tensor]) -> Tensor:
        """Each row's prompt and, right behind its last token, the new ones: (b, n + new), padded after."""
        b, n = self.prompt.shape
        lengths = torch.tensor(self.lengths, device=self.prompt.device)[:, None]
        out = self.prompt.new_full((b, n + len(new)), self.model.config.pad_token)
        places = torch.arange(n, device=out.device)
        out[:, :n] = torch.where(places < lengths, self.prompt, out[:, :n])
        return out.scatter_(1, lengths + torch.arange(len(new), device=out.device), torch.stack(new, 1))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """No gradients, and all modules in evaluation mode; both are as before when the block ends."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def _check_stop_tokens(stop_tokens: Collection[int], vocab_size: int) -> set[int]:
    if isinstance(stop_tokens, (int, str)) or not all(type(token) is int for token in stop_tokens):
        raise TypeError(f"stop_tokens must be a collection of integers, got {stop_tokens!r}")
    if outside := sorted(token for token in stop_tokens if not 0 <= token < vocab_size):
        raise ValueError(f"stop_tokens must be from 0 to vocab_size - 1 = {vocab_size - 1}, got {outside}")
    return set(stop_tokens)
