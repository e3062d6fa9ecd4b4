"""What a run carries from step to step: the model, the optimiser, and both as named tensors."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ..modules import LongNetLM
from .checkpoint import Checkpoint, find_checkpoint
from .config import ConfigError, TrainConfig
from .data import mix_seed
from .ranks import Ranks, place_model


def make_model(config: TrainConfig) -> LongNetLM:
    """The model of a run with its initial weights, which the seed decides; settings it refuses are errors."""
    torch.manual_seed(mix_seed(config.seed, "weights"))
    try:
        return LongNetLM(**config.model_settings())
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the settings must be those of a LongNetLM: {error}") from None


class TrainState:
    """Model and optimiser of this rank. Adam's averages exist from the beginning, and can be loaded."""

    def __init__(self, config: TrainConfig, ranks: Ranks) -> None:
        self.model = make_model(config)
        place_model(self.model, ranks, config.shard_parameters)
        matrices = [x for x in self.model.parameters() if x.dim() >= 2]
        others = [x for x in self.model.parameters() if x.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        betas = config.beta1, config.beta2
        self.optimiser = torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas)
        for x in self.model.parameters():
            self.optimiser.state[x] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(x),
                "exp_avg_sq": torch.zeros_like(x),
            }

    def tensors(self) -> dict[str, Tensor]:
        """All that a checkpoint holds, by name; what is written into them changes the state."""
        named = model_tensors(self.model)
        for name, x in self.model.named_parameters():
            for part in ("exp_avg", "exp_avg_sq"):
                named[f"{part}.{name}"] = self.optimiser.state[x][part]
        return named

    def load(self, checkpoint: Checkpoint) -> None:
        """Goes back to a checkpoint."""
        checkpoint.load(self.tensors())
        for x in self.model.parameters():
            self.optimiser.state[x]["step"].fill_(checkpoint.step)

    def set_rate(self, rate: float) -> None:
        for group in self.optimiser.param_groups:
            group["lr"] = rate


def model_tensors(model: LongNetLM) -> dict[str, Tensor]:
    return {f"model.{name}": tensor.detach() for name, tensor in model.state_dict().items()}


def load_model(folder: Path | str) -> LongNetLM:
    """The model of a run's folder, or of one of its checkpoints, in evaluation mode, in this process alone.

    Of a run it is the newest checkpoint that is whole. `save_pretrained` of the model writes it for others.
    """
    checkpoint, _ = find_checkpoint(Path(folder))
    return model_of(checkpoint)


def model_of(checkpoint: Checkpoint) -> LongNetLM:
    """The model of a checkpoint, in evaluation mode."""
    model = make_model(TrainConfig.from_dict(checkpoint.facts["config"], str(checkpoint.path)))
    checkpoint.load(model_tensors(model))
    return model.eval()
