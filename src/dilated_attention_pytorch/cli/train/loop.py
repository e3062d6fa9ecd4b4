"""The loop of a run: steps, validations and checkpoints, from the last checkpoint to the end or a signal."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import IO, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from ...modules import LongNetLM
from .checkpoint import (
    CHECKPOINTS,
    Checkpoint,
    find_checkpoint,
    latest_checkpoint,
    named_checkpoints,
    save_checkpoint,
)
from .config import ConfigError, TrainConfig, changed_settings
from .data import batch_at, mix_seed, split_corpus, windows_of
from .metrics import Metrics, replace_file
from .ranks import Ranks, backward, hold_gradients, join_ranks, place_model, sum_gradients

CONFIG_FILE = "config.json"
FIRST_CONTEXT = 64  # bytes of context up to which all positions count as one class


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


class StopWish:
    """While it is entered, the first Ctrl-C or SIGTERM only sets `is_made`: the run ends after its step.

    A second Ctrl-C interrupts at once. Not under torchrun: there a worker gets each signal twice, from the
    terminal and from torchrun.
    """

    def __init__(self) -> None:
        self.is_made = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopWish:
        if threading.current_thread() is threading.main_thread():  # no other can hear signals
            signals = (signal.SIGINT, signal.SIGTERM)
            self._before = {number: signal.signal(number, self._hear) for number in signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.is_made and number == signal.SIGINT and "TORCHELASTIC_RUN_ID" not in os.environ:
            raise KeyboardInterrupt
        self.is_made = True


class Run:
    """One process' share of a training run in `folder`.

    What a step computes depends on the settings, the step and the weights before it alone: its batch and its
    random numbers are drawn from the seed and the step. So a run that goes on from a checkpoint repeats, bit
    for bit on the same machine, what one without interruption computes.
    """

    def __init__(self, config: TrainConfig, folder: Path, ranks: Ranks) -> None:
        self.config, self.folder, self.ranks = config, folder, ranks
        self.train_data, self.validation_data = split_corpus(config)
        self.model = make_model(config)
        place_model(self.model, ranks, config.shard_parameters)
        self.optimiser = make_optimiser(self.model, config)
        self.step, self.loss = 0, math.nan
        self.validation: dict[str, Any] | None = None
        self.saved_step: int | None = None
        self.owes_validation = False  # it was due when the run was interrupted, and can wait
        self._digest = [self.train_data.digest(), self.validation_data.digest()]

    def tensors(self) -> dict[str, Tensor]:
        """All that a checkpoint holds, by name; what is written into them changes the run."""
        named = model_tensors(self.model)
        for name, x in self.model.named_parameters():
            for part in ("exp_avg", "exp_avg_sq"):
                named[f"{part}.{name}"] = self.optimiser.state[x][part]
        return named

    def resume(self) -> list[str]:
        """Goes on from the newest whole checkpoint, if there is any; tells what is wrong with newer ones."""
        checkpoint, problems = latest_checkpoint(self.folder / CHECKPOINTS, self.ranks)
        if checkpoint is not None:
            self.load(checkpoint)
        return problems

    def load(self, checkpoint: Checkpoint) -> None:
        """Goes back to a checkpoint, which must be one of the same settings and data."""
        before = TrainConfig.from_dict(checkpoint.facts["config"], str(checkpoint.path))
        if changed := changed_settings(before, self.config):
            raise ConfigError(f"a run must go on with its settings, got changes of {'; '.join(changed)}")
        if checkpoint.facts["data"] != self._digest:
            raise ConfigError("a run must go on with its data, got other files than those of the checkpoint")
        checkpoint.load(self.tensors())
        for x in self.model.parameters():
            self.optimiser.state[x]["step"].fill_(checkpoint.step)
        self.step = self.saved_step = checkpoint.step
        self.owes_validation = bool(checkpoint.facts["owes_validation"])

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
        facts = {"config": asdict(self.config), "data": self._digest, "ranks": self.ranks.size}
        facts["owes_validation"] = self.owes_validation
        folder, keep = self.folder / CHECKPOINTS, self.config.keep_checkpoints
        save_checkpoint(folder, self.ranks, self.step, self.tensors(), facts, keep)
        self.saved_step = self.step

    def take_step(self, metrics: Metrics | None = None) -> None:
        """Trains on the batch of the next step."""
        config, begin = self.config, time.perf_counter()
        rate = learning_rate(config, self.step)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        torch.manual_seed(mix_seed(config.seed, "step", self.step, self.ranks.rank))
        loss = self._gradients()
        norm = self._clip()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            what = f"loss {loss} and gradient norm {norm} at step {self.step + 1}"
            raise DivergedError(f"training needs finite numbers, got {what}; try a lower learning_rate")
        self.optimiser.step()
        self.step, self.loss = self.step + 1, loss
        if metrics is not None:
            metrics.tell_step(self.step, loss, rate, norm, time.perf_counter() - begin)

    def _gradients(self) -> float:
        """Leaves the gradient of the mean loss of the step's batch in the model, and returns that loss."""
        config = self.config
        parts = self.ranks.own_rows(batch_at(self.train_data, self.step, config)).chunk(config.accumulation)
        total = torch.zeros((), device=self.ranks.device)
        self.model.train()
        self.optimiser.zero_grad()
        for index, rows in enumerate(parts):
            hold_gradients(self.model, index + 1 < len(parts))
            # This rank's share of the mean over all bytes of the whole batch: shares are to be summed.
            loss = self._losses(rows).sum() / (config.batch_size * config.context_length)
            backward(loss, self.model, self.ranks)
            total += loss.detach()
        sum_gradients(self.model, self.ranks)
        return self.ranks.sum(total).item()

    def _losses(self, rows: Tensor) -> Tensor:
        """(rows, length) of this rank's part of sequences (rows, length + 1), in nats."""
        tokens, targets = self.ranks.own_part(rows[:, :-1]), self.ranks.own_part(rows[:, 1:])
        cast: AbstractContextManager[Any] = nullcontext()
        if self.config.precision != "float32":
            cast = torch.autocast(self.ranks.device.type, dtype=getattr(torch, self.config.precision))
        with cast:
            logits = self.model(tokens)
        losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view_as(targets)

    def _clip(self) -> float:
        """The norm of the gradient, which is then cut to clip_norm."""
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm or math.inf)
        return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()

    def validate(self, metrics: Metrics | None = None) -> dict[str, Any]:
        """Bits per byte of the validation data: of all, and by the bytes of context that there were.

        All ranks must call it. Every ring computes all windows.
        """
        config, length = self.config, self.config.context_length
        windows = windows_of(self.validation_data, config.validation_windows, length)
        start, stop = self.ranks.own_bounds(length)
        nats = torch.zeros(length, dtype=torch.float64)
        self.model.eval()
        with torch.no_grad():
            for rows in torch.split(windows, max(1, config.batch_size // config.accumulation)):
                nats[start:stop] += self._losses(rows).double().sum(0).cpu()
        summed = self.ranks.sum(nats.to(self.ranks.device)).cpu() if self.ranks.size > 1 else nats
        bits = summed / (math.log(2) * len(windows) * self.ranks.num_rings)
        self.validation = {
            "bits_per_byte": bits.mean().item(),
            "by_context": {f"{a + 1}-{b}": bits[a:b].mean().item() for a, b in context_classes(length)},
        }
        self.owes_validation = False
        if metrics is not None:
            metrics.tell_validation(self.step, self.validation)
        return self.validation


def train(
    config: TrainConfig, folder: Path, *, resume: bool = False, progress: IO[str] | None = None
) -> Summary:
    """Trains in `folder` until the last step or a signal; under torchrun all ranks call it.

    Without `resume` the folder must not hold a run. Lines of progress go to `progress`, by default to stderr.
    """
    with StopWish() as stop, join_ranks(config) as ranks:
        if not resume and named_checkpoints(folder / CHECKPOINTS):
            raise ConfigError(f"out must be the folder of a new run unless --resume goes on, got {folder}")
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"out must be a folder, got the file {folder}")
        own = Run(config, folder, ranks)
        problems = own.resume() if resume else []
        folder.mkdir(parents=True, exist_ok=True)  # not before all is well: a refused run leaves nothing
        metrics = Metrics(folder, config, own.step, progress) if ranks.is_first else None
        try:
            if metrics is not None:
                replace_file(folder / CONFIG_FILE, config.to_json())
                metrics.say(*_greeting(own, problems))
            summary = own.train(stop, metrics)
            if metrics is not None and summary.is_interrupted:
                metrics.say(f"interrupted and saved after step {summary.step}; --resume goes on")
            elif metrics is not None:
                metrics.say(f"done: {summary.steps} steps, saved in {folder}")
            return summary
        finally:
            if metrics is not None:
                metrics.close()
            del own  # before the group of the ranks


def _greeting(own: Run, problems: list[str]) -> list[str]:
    ranks, sizes = own.ranks, (len(own.train_data), len(own.validation_data))
    parameters, where = sum(x.numel() for x in own.model.parameters()), ranks.device.type
    if ranks.size > 1:
        where += f", {ranks.size} ranks in {ranks.num_rings} ring(s) of {ranks.ring_size}"
    return [
        *(f"warning: {each}; it was set aside, and an older checkpoint is used" for each in problems),
        f"{parameters:,} parameters on {where}; {sizes[0]:,} bytes, {sizes[1]:,} to validate",
        f"from step {own.step} of {own.config.steps}" if own.step else f"{own.config.steps} steps",
    ]


def make_model(config: TrainConfig) -> LongNetLM:
    """The model of a run with its initial weights, which the seed decides; settings it refuses are errors."""
    torch.manual_seed(mix_seed(config.seed, "weights"))
    try:
        return LongNetLM(**config.model_settings())
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the settings must be those of a LongNetLM: {error}") from None


def make_optimiser(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW that decays matrices only. Its averages exist from the beginning, and can be loaded."""
    matrices = [x for x in model.parameters() if x.dim() >= 2]
    others = [x for x in model.parameters() if x.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    made = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2))
    for x in model.parameters():
        averages = {"exp_avg": torch.zeros_like(x), "exp_avg_sq": torch.zeros_like(x)}
        made.state[x] = {"step": torch.tensor(0.0), **averages}
    return made


def model_tensors(model: LongNetLM) -> dict[str, Tensor]:
    return {f"model.{name}": tensor.detach() for name, tensor in model.state_dict().items()}


def load_model(folder: Path | str) -> LongNetLM:
    """The model of a run's folder, or of one of its checkpoints, in evaluation mode, in this process alone.

    Of a run it is the newest checkpoint that is whole. `save_pretrained` of the model writes it for others.
    """
    return model_of(find_checkpoint(Path(folder))[0])


def model_of(checkpoint: Checkpoint) -> LongNetLM:
    """The model of a checkpoint, in evaluation mode."""
    model = make_model(TrainConfig.from_dict(checkpoint.facts["config"], str(checkpoint.path)))
    checkpoint.load(model_tensors(model))
    return model.eval()


def learning_rate(config: TrainConfig, step: int) -> float:
    """Of `step`, counted from 0: a linear rise, then half a cosine to `final_share` of the peak.

    The first step has a rate above 0, and the last one has exactly the final share.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.steps - 1 - config.warmup_steps)
    share = 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
    return config.learning_rate * (config.final_share + (1.0 - config.final_share) * share)


def context_classes(length: int) -> list[tuple[int, int]]:
    """[start, stop) of positions, doubling: the first has up to FIRST_CONTEXT bytes of context."""
    edges = [0]
    while edges[-1] < length:
        edges.append(min(length, max(FIRST_CONTEXT, 2 * edges[-1])))
    return list(pairwise(edges))


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
