"""The loop of a run: steps, validations and checkpoints, from the last checkpoint to the end or a signal."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from .checkpoint import CHECKPOINTS, Checkpoint, CheckpointFolder
from .config import ConfigError, TrainConfig, changed_settings
from .data import Corpus, batch_at, mix_seed, split_corpus, windows_of
from .metrics import Metrics
from .ranks import Ranks, backward, hold_gradients, sum_gradients
from .schedule import cosine_rate
from .signals import StopWish
from .state import TrainState
from .validation import validate


class DivergedError(RuntimeError):
    """The loss is no number any more."""


@dataclass(frozen=True)
class Summary:
    """How a run ended: after `step` of `steps`, with the last loss and validation if there were any."""

    step: int
    steps: int
    loss: float | None
    validation: dict[str, Any] | None
    is_interrupted: bool


class Run:
    """One process' share of a training run in `folder`.

    What a step computes depends on the settings, the step and the weights before it alone: its batch and its
    random numbers are drawn from the seed and the step. So a run that goes on from a checkpoint repeats, bit
    for bit on the same machine, what one without interruption computes.
    """

    def __init__(self, config: TrainConfig, folder: Path, ranks: Ranks) -> None:
        self.config, self.folder, self.ranks = config, folder, ranks
        self.train_data, self.validation_data = split_corpus(config)
        self.state = TrainState(config, ranks)
        self.checkpoints = CheckpointFolder(folder / CHECKPOINTS, ranks, config.keep_checkpoints)
        self.step, self.loss = 0, math.nan
        self.validation: dict[str, Any] | None = None
        self.saved_step: int | None = None
        self.owes_validation = False  # it was due when the run was interrupted, and can wait
        self._digest = _digest_of(self.train_data, self.validation_data)

    def resume(self) -> list[str]:
        """Goes on from the newest whole checkpoint, if there is any; tells what is wrong with newer ones."""
        checkpoint, problems = self.checkpoints.latest()
        if checkpoint is not None:
            self._check_same(checkpoint)
            self.state.load(checkpoint)
            self.step = self.saved_step = checkpoint.step
            self.owes_validation = bool(checkpoint.facts["owes_validation"])
        return problems

    def train(self, stop: StopWish, metrics: Metrics | None) -> Summary:
        """Runs until the last step or until `stop` is made, and saves in both cases. `metrics` of rank 0."""
        config, interrupted = self.config, False
        if self.owes_validation:
            self.validate(metrics)
        while self.step < config.steps and not interrupted:
            self.take_step(metrics)
            is_last = self.step == config.steps
            interrupted = self.ranks.any(stop.is_made) and not is_last
            self.owes_validation = is_last or _is_due(self.step, config.validate_every)
            if self.owes_validation and not interrupted:
                self.validate(metrics)
            if interrupted or is_last or _is_due(self.step, config.checkpoint_every):
                self.save(metrics)
        loss = None if math.isnan(self.loss) else self.loss
        return Summary(self.step, config.steps, loss, self.validation, interrupted)

    def save(self, metrics: Metrics | None = None) -> None:
        """Writes a checkpoint of the last step, unless there is one."""
        if self.saved_step == self.step:
            return
        if metrics is not None:
            metrics.sync()
        facts = {"config": self.config.to_dict(), "data": self._digest, "ranks": self.ranks.size}
        facts["owes_validation"] = self.owes_validation
        self.checkpoints.save(self.step, self.state.tensors(), facts)
        self.saved_step = self.step

    def take_step(self, metrics: Metrics | None = None) -> None:
        """Trains on the batch of the next step."""
        config, begin = self.config, time.perf_counter()
        rate = learning_rate(config, self.step)
        self.state.set_rate(rate)
        torch.manual_seed(mix_seed(config.seed, "step", self.step, self.ranks.rank))
        loss = self._gradients()
        norm = self._clip()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            what = f"loss {loss} and gradient norm {norm} at step {self.step + 1}"
            raise DivergedError(f"training needs finite numbers, got {what}; try a lower learning_rate")
        self.state.optimiser.step()
        self.step, self.loss = self.step + 1, loss
        if metrics is not None:
            metrics.tell_step(self.step, loss, rate, norm, time.perf_counter() - begin)

    def _gradients(self) -> float:
        """Leaves the gradient of the mean loss of the step's batch in the model, and returns that loss."""
        config, model = self.config, self.state.model
        batch = batch_at(
            self.train_data,
            self.step,
            batch_size=config.batch_size,
            length=config.context_length,
            seed=config.seed,
        )
        parts = self.ranks.own_rows(batch).chunk(config.accumulation)
        total = torch.zeros((), device=self.ranks.device)
        model.train()
        self.state.optimiser.zero_grad()
        for index, rows in enumerate(parts):
            hold_gradients(model, index + 1 < len(parts))
            loss = self._loss(rows)
            backward(loss, model, self.ranks)
            total += loss.detach()
        sum_gradients(model, self.ranks)
        return self.ranks.sum(total).item()

    def _loss(self, rows: Tensor) -> Tensor:
        """This rank's share of the mean over all bytes of the whole batch: shares are to be summed."""
        tokens, targets = self.ranks.own_part(rows[:, :-1]), self.ranks.own_part(rows[:, 1:])
        with self._cast():
            logits = self.state.model(tokens)
        summed = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
        return summed / (self.config.batch_size * self.config.context_length)

    def _clip(self) -> float:
        """The norm of the gradient, which is then cut to clip_norm."""
        limit = self.config.clip_norm or math.inf
        norm = nn.utils.clip_grad_norm_(self.state.model.parameters(), limit)
        return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()

    def validate(self, metrics: Metrics | None = None) -> dict[str, Any]:
        """Bits per byte of the validation data, as `validation.validate` gives them."""
        config = self.config
        windows = windows_of(self.validation_data, config.validation_windows, config.context_length)
        rows = max(1, config.batch_size // config.accumulation)
        self.validation = validate(self.state.model, windows, self.ranks, self._cast(), rows)
        self.owes_validation = False
        if metrics is not None:
            metrics.tell_validation(self.step, self.validation)
        return self.validation

    def _cast(self) -> AbstractContextManager[Any]:
        if self.config.precision == "float32":
            return nullcontext()
        return torch.autocast(self.ranks.device.type, dtype=getattr(torch, self.config.precision))

    def _check_same(self, checkpoint: Checkpoint) -> None:
        before = TrainConfig.from_dict(checkpoint.facts["config"], str(checkpoint.path))
        if changed := changed_settings(before, self.config):
            raise ConfigError(f"a run must go on with its settings, got changes of {'; '.join(changed)}")
        if checkpoint.facts["data"] != self._digest:
            raise ConfigError("a run must go on with its data, got other files than those of the checkpoint")


def learning_rate(config: TrainConfig, step: int) -> float:
    """Of a step, counted from 0."""
    return cosine_rate(
        step,
        peak=config.learning_rate,
        steps=config.steps,
        warmup_steps=config.warmup_steps,
        final_share=config.final_share,
    )


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _digest_of(*parts: Corpus) -> list[str]:
    return [part.digest() for part in parts]
