"""The loop of a run: steps, validations and checkpoints, from the last checkpoint to the end or a signal."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from ...modules import LongNetLM
from ..bench.record import write_text
from . import CHANGEABLE, ConfigError, TrainConfig, folder as files
from .data import batch_at, mix_seed, split_corpus, windows_of
from .folder import CHECKPOINTS, Checkpoint, Metrics
from .ranks import Ranks, join_ranks, place_model

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

    def _hear(self, number: int, *_: object) -> None:
        if self.is_made and number == signal.SIGINT and "TORCHELASTIC_RUN_ID" not in os.environ:
            raise KeyboardInterrupt
        self.is_made = True


class Run:
    """One process' share of a training run in `folder`; what it tells goes to `metrics`, if it has any.

    What a step computes depends on the settings, the step and the weights before it alone: its batch and its
    random numbers are drawn from the seed and the step. So a run that goes on from a checkpoint repeats, bit
    for bit on the same machine, what one without interruption computes.
    """

    metrics: Metrics | None = None

    def __init__(self, config: TrainConfig, folder: Path, ranks: Ranks) -> None:
        self.config, self.folder, self.ranks = config, folder, ranks
        self.train_data, self.validation_data = split_corpus(config)
        self.model = make_model(config)
        place_model(self.model, ranks, config.shard_parameters)
        self.optimiser = make_optimiser(self.model, config)
        self.step, self.loss = 0, math.nan
        self.validation: dict[str, Any] | None = None
        self._digest = [self.train_data.digest(), self.validation_data.digest()]

    @property
    def size(self) -> str:
        """Of the model, the ranks and the data, in words."""
        ranks, parameters = self.ranks, sum(x.numel() for x in self.model.parameters())
        rings = f", {ranks.size} ranks in {ranks.num_rings} ring(s) of {ranks.ring_size}"
        where = ranks.device.type + (rings if ranks.size > 1 else "")
        data = f"{len(self.train_data):,} bytes, {len(self.validation_data):,} to validate"
        return f"{parameters:,} parameters on {where}; {data}"

    def tensors(self) -> dict[str, Tensor]:
        """All that a checkpoint holds, by name; what is written into them changes the run."""
        named = model_tensors(self.model)
        for name, x in self.model.named_parameters():
            for part in ("exp_avg", "exp_avg_sq"):
                named[f"{part}.{name}"] = self.optimiser.state[x][part]
        return named

    def resume(self) -> list[str]:
        """Goes on from the newest whole checkpoint, if there is any; tells what is wrong with newer ones."""
        checkpoint, problems = files.latest_checkpoint(self.folder / CHECKPOINTS, self.ranks)
        if checkpoint is not None:
            self.load(checkpoint)
        return problems

    def load(self, checkpoint: Checkpoint) -> None:
        """Goes back to a checkpoint, which must be one of the same settings and data."""
        before = TrainConfig.from_dict(checkpoint.facts["config"], str(checkpoint.path))
        pairs = [(x.name, getattr(before, x.name), getattr(self.config, x.name)) for x in fields(before)]
        changed = [(name, old, new) for name, old, new in pairs if old != new and name not in CHANGEABLE]
        if changed:
            told = "; ".join(f"{name}: {old!r}, now {new!r}" for name, old, new in changed)
            raise ConfigError(f"a run must go on with its settings, got changes of {told}")
        if checkpoint.facts["data"] != self._digest:
            raise ConfigError("a run must go on with its data, got other files than those of the checkpoint")
        checkpoint.load(self.tensors())
        for x in self.model.parameters():
            self.optimiser.state[x]["step"].fill_(checkpoint.step)
        self.step = checkpoint.step

    def train(self, stop: StopWish) -> Summary:
        """Runs until the last step or until `stop` is made, and saves in both cases."""
        config, is_interrupted = self.config, False
        while self.step < config.steps and not is_interrupted:
            self.take_step()
            is_last = self.step == config.steps
            is_interrupted = self.ranks.any(stop.is_made) and not is_last
            if is_last or self._is_due(config.validate_every):
                self.validate()
            if is_last or is_interrupted or self._is_due(config.checkpoint_every):
                self.save()
        loss = None if math.isnan(self.loss) else self.loss
        return Summary(self.step, config.steps, loss, self.validation, is_interrupted)

    def _is_due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def save(self) -> None:
        """Writes a checkpoint of the last step."""
        if self.metrics is not None:
            self.metrics.sync()
        facts = {"config": asdict(self.config), "data": self._digest, "ranks": self.ranks.size}
        folder, keep = self.folder / CHECKPOINTS, self.config.keep_checkpoints
        files.save_checkpoint(folder, self.ranks, self.step, self.tensors(), facts, keep)

    def take_step(self) -> None:
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
        if self.metrics is not None:
            self.metrics.tell_step(self.step, loss, rate, norm, time.perf_counter() - begin)

    def _gradients(self) -> float:
        """Leaves the gradient of the mean loss of the step's batch in the model, and returns that loss."""
        config, ranks, model = self.config, self.ranks, self.model
        parts = ranks.own_rows(batch_at(self.train_data, self.step, config)).chunk(config.accumulation)
        total = torch.zeros((), device=ranks.device)
        model.train()
        self.optimiser.zero_grad()
        for index, rows in enumerate(parts, 1):
            # This rank's share of the mean over all bytes of the whole batch: shares are to be summed.
            loss = self._losses(rows).sum() / (config.batch_size * config.context_length)
            total += loss.detach()
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(index == len(parts))
                loss = loss * ranks.size  # FSDP2 averages over the ranks, and gloo knows no other division
            torch.autograd.backward(loss)
        if ranks.size > 1 and not isinstance(model, FSDPModule):
            for x in model.parameters():
                if x.grad is not None:
                    ranks.sum(x.grad)
        return ranks.sum(total).item()

    def _losses(self, rows: Tensor) -> Tensor:
        """(rows, length) of this rank's shard of sequences (rows, length + 1), in nats."""
        tokens, targets = self.ranks.shard(rows[:, :-1]), self.ranks.shard(rows[:, 1:])
        dtype = getattr(torch, self.config.precision)
        is_exact = dtype == torch.float32
        with nullcontext() if is_exact else torch.autocast(self.ranks.device.type, dtype=dtype):
            logits = self.model(tokens)
        losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view_as(targets)

    def _clip(self) -> float:
        """The norm of the gradient, which is then cut to clip_norm."""
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm or math.inf)
        return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()

    def validate(self) -> dict[str, Any]:
        """Bits per byte of the validation data: of all, and by the bytes of context that there were.

        All ranks must call it. Every ring computes all windows.
        """
        config, length = self.config, self.config.context_length
        windows = windows_of(self.validation_data, config.validation_windows, length)
        start, stop = self.ranks.bounds(length)
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
        if self.metrics is not None:
            self.metrics.tell_validation(self.step, self.validation)
        return self.validation


def train(
    config: TrainConfig, folder: Path, *, resume: bool = False, progress: IO[str] | None = None
) -> Summary:
    """Trains in `folder` until the last step or a signal; under torchrun all ranks call it.

    Without `resume` the folder must not hold a run. Lines of progress go to `progress`, by default to stderr.
    """
    with StopWish() as stop, join_ranks(config) as ranks:
        return _train(config, folder, ranks, stop, resume, progress)


def _train(
    config: TrainConfig, folder: Path, ranks: Ranks, stop: StopWish, resume: bool, progress: IO[str] | None
) -> Summary:
    """A function of its own, so that the model is gone before the group of the ranks is."""
    if not resume and files.named_checkpoints(folder / CHECKPOINTS):
        raise ConfigError(f"out must be the folder of a new run unless --resume goes on, got {folder}")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"out must be a folder, got the file {folder}")
    if config.tensorboard:
        try:
            import_module(files.TENSORBOARD)
        except ImportError:
            rule = "tensorboard needs the package tensorboard, which is missing"
            raise ConfigError(f"{rule}: pip install 'dilated-attention[train]'") from None
    run = Run(config, folder, ranks)
    problems = run.resume() if resume else []
    folder.mkdir(parents=True, exist_ok=True)  # not before all is well: a refused run leaves nothing
    if not ranks.is_first:
        return run.train(stop)
    run.metrics = metrics = Metrics(folder, config, run.step, progress)
    try:
        write_text(folder / "config.json", config.to_json())
        for problem in problems:
            metrics.say(f"warning: {problem}; it was set aside, and an older checkpoint is used")
        metrics.say(run.size)
        metrics.say(f"from step {run.step} of {config.steps}" if run.step else f"{config.steps} steps")
        summary = run.train(stop)
        end = f"done: {summary.steps} steps, saved in {folder}"
        if summary.is_interrupted:
            end = f"interrupted and saved after step {summary.step}; --resume goes on"
        metrics.say(end)
        return summary
    finally:
        metrics.close()


def make_model(config: TrainConfig) -> LongNetLM:
    """The model of a run with its initial weights, which the seed decides; settings it refuses are errors."""
    torch.manual_seed(mix_seed(config.seed, "weights"))
    try:
        return LongNetLM(**config.model_settings())
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the settings must be those of a LongNetLM: {error}") from None


def make_optimiser(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW that decays matrices only. Its averages exist from the beginning, and can be loaded."""
    matrices, others = ([x for x in model.parameters() if (x.dim() >= 2) == wide] for wide in (True, False))
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": others},
    ]
    betas = (config.beta1, config.beta2)
    made = torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, weight_decay=0.0)
    for x in model.parameters():
        averages = {"exp_avg": torch.zeros_like(x), "exp_avg_sq": torch.zeros_like(x)}
        made.state[x] = {"step": torch.tensor(0.0), **averages}
    return made


def model_tensors(model: LongNetLM) -> dict[str, Tensor]:
    return {f"model.{name}": tensor.detach() for name, tensor in model.state_dict().items()}


def load_model(path: Path | str) -> LongNetLM:
    """The model of a run's folder, or of one of its checkpoints, in evaluation mode, in this process alone.

    Of a run it is the newest checkpoint that is whole. `save_pretrained` of the model writes it for others.
    """
    return model_of(files.find_checkpoint(Path(path))[0])


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
