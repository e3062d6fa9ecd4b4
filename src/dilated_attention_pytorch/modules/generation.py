"""The loop of generation: fill the caches with the prompt, then choose and feed back one token at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from ..checks import check_positive_int, whole_numbers
from .sampling import Sampler, Sampling

if TYPE_CHECKING:
    from .longnet import LongNetLM

_Module = TypeVar("_Module", bound=nn.Module)


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
        stops = torch.tensor(sorted(self.stop_tokens), dtype=torch.int64, device=self.prompt.device)
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
        places = torch.arange(n, device=out.device)
        out[:, :n] = torch.where(places < lengths, self.prompt, out[:, :n])
        return out.scatter_(1, lengths + torch.arange(len(new), device=out.device), torch.stack(new, 1))


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


def _check_stop_tokens(stop_tokens: Iterable[int], vocab_size: int) -> set[int]:
    # Once: an iterator has its tokens to give a single time.
    tokens: list[Any] = list(stop_tokens) if isinstance(stop_tokens, Iterable) else [None]
    if isinstance(stop_tokens, str) or not all(type(token) is int for token in tokens):
        raise TypeError(f"stop_tokens must be a collection of integers, got {stop_tokens!r}")
    if outside := sorted(token for token in tokens if not 0 <= token < vocab_size):
        raise ValueError(f"stop_tokens must be from 0 to vocab_size - 1 = {vocab_size - 1}, got {outside}")
    return set(tokens)
