"""Fine-tunes a slide encoder to tell slides apart by a few of their tiles, and shows which tiles it looks at.

    python examples/finetune_slides.py
    python examples/finetune_slides.py --heat-map map.png --epochs 40

The slides are synthetic: tiles of random features on a grid and, in one slide of four, a patch of a few tiles
that lean in a direction of their own. Labels are of slides only. The encoder is a small one with random
weights, in the place of `LongNetViT.from_pretrained("slide_encoder.pth")`. The rest is what a cohort needs: a
loss that weighs the rare class, first a head over the frozen encoder, then both with a smaller step for the
encoder, early stopping by slides that are not trained on, and figures of slides that took no part in either.
Prints their AUC for both, and how many times its share of the tiles' attention the planted patch gets.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from dilated_attention_pytorch import LongNetViT
from dilated_attention_pytorch.integrations.slide_maps import heat_map, write_png

FEATURES, WIDTH, TILE_SIZE, SIDE = 32, 32, 256, 12
SIZES = torch.tensor([60, 80, 100])  # tiles of a slide


class Cohort(NamedTuple):
    """Slides (s, n, FEATURES), padded at their ends, with places, labels and planted patches."""

    tiles: Tensor
    coords: Tensor
    padding: Tensor
    labels: Tensor
    planted: Tensor

    def pick(self, index: Tensor) -> Cohort:
        return Cohort(*(each[index] for each in self))


def make_cohort(count: int, seed: int) -> Cohort:
    signal = torch.randn(FEATURES, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    sizes, most = SIZES[torch.randint(len(SIZES), (count, 1), generator=generator)], int(SIZES.max())
    padding = torch.arange(most) >= sizes
    order = torch.rand(count, SIDE * SIDE, generator=generator).argsort(1)[:, :most]
    cells = torch.stack([order % SIDE, order // SIDE], -1)
    corner = torch.randint(SIDE - 2, (count, 1, 2), generator=generator)
    planted = ((cells >= corner) & (cells < corner + 3)).all(-1) & ~padding
    planted &= (torch.arange(count) % 4 == 0)[:, None]
    tiles = torch.randn(count, most, FEATURES, generator=generator) + planted[..., None] * signal
    return Cohort(tiles, cells * TILE_SIZE, padding, planted.any(1), planted)


def make_batches(cohort: Cohort) -> list[Cohort]:
    """At random, of slides of one size each, which run together where others run one after the other."""
    sizes = (~cohort.padding).sum(1)
    order = torch.randperm(len(sizes))
    parts = [part for size in SIZES for part in order[sizes[order] == size].split(16)]
    return [cohort.pick(parts[index]) for index in torch.randperm(len(parts)).tolist()]


def embed(encoder: LongNetViT, cohort: Cohort) -> Tensor:
    [embedding] = encoder(cohort.tiles, cohort.coords, padding_mask=cohort.padding)
    return embedding


def auc(scores: Tensor, labels: Tensor) -> float:
    """How often, of a positive and a negative slide, the positive one has the larger score."""
    larger = scores[labels][:, None] - scores[~labels][None]
    return ((larger > 0).double() + 0.5 * (larger == 0)).mean().item()


@torch.no_grad()
def evaluate(model: nn.ModuleDict, cohort: Cohort) -> tuple[float, float]:
    """Loss and AUC."""
    model.eval()
    scores = model["head"](embed(model["encoder"], cohort)).squeeze(1)
    loss = binary_cross_entropy_with_logits(scores, cohort.labels.float(), pos_weight=rarity(cohort.labels))
    return loss.item(), auc(scores, cohort.labels)


def rarity(labels: Tensor) -> Tensor:
    """The weight of a positive slide with which both classes weigh the same."""
    return (~labels).sum() / labels.sum()


def train(
    model: nn.ModuleDict, cohort: Cohort, held_out: Cohort, *, freeze: bool, epochs: int, patience: int
) -> int:
    """Trains until the loss of `held_out` has not fallen for `patience` epochs; keeps the best weights."""
    model["encoder"].requires_grad_(not freeze)
    steps = [{"params": model["head"].parameters(), "lr": 1e-2}]
    steps += [] if freeze else [{"params": model["encoder"].parameters(), "lr": 2e-3}]
    optimizer = torch.optim.AdamW(steps, weight_decay=0.01)
    weight = rarity(cohort.labels)
    best, best_epoch, kept = float("inf"), 0, copy.deepcopy(model.state_dict())
    for epoch in range(1, epochs + 1):
        model.train()
        if freeze:
            model["encoder"].eval()  # a frozen encoder drops nothing
        for batch in make_batches(cohort):
            scores = model["head"](embed(model["encoder"], batch)).squeeze(1)
            loss = binary_cross_entropy_with_logits(scores, batch.labels.float(), pos_weight=weight)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        loss_now, auc_now = evaluate(model, held_out)
        if loss_now < best - 0.005:
            best, best_epoch, kept = loss_now, epoch, copy.deepcopy(model.state_dict())
        print(f"  epoch {epoch}: validation loss {loss_now:.3f}, AUC {auc_now:.3f}")
        if epoch - best_epoch >= patience:
            break
    model.load_state_dict(kept)
    return best_epoch


def share_of_patch(maps: Tensor, cohort: Cohort) -> float:
    """Attention of the planted tiles over their share of all tiles, mean over the slides that have them."""
    has = cohort.planted.any(1)
    mass = (maps * cohort.planted).sum(1)[has]
    share = cohort.planted.sum(1)[has] / (~cohort.padding).sum(1)[has]
    return (mass / share).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--epochs", type=int, default=25, help="at most, of each stage (default: %(default)s)"
    )
    parser.add_argument("--patience", type=int, default=4, help="epochs without gain (default: %(default)s)")
    parser.add_argument("--slides", type=int, default=384, help="to train on (default: %(default)s)")
    parser.add_argument("--depth", type=int, default=1, help="layers of the encoder (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the order of slides")
    parser.add_argument("--heat-map", type=Path, metavar="FILE", help="picture of a test slide, .png")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    cohorts = [make_cohort(n, seed) for seed, n in enumerate((options.slides, 96, 160), 1)]
    training, validation, test = cohorts
    branches = {"segment_lengths": (64, 256), "dilation_rates": (1, 2)}
    encoder = LongNetViT(FEATURES, WIDTH, options.depth, 2, **branches, dropout=0.1, drop_path_rate=0.0)
    model = nn.ModuleDict({"encoder": encoder, "head": nn.Linear(WIDTH, 1)})
    print(f"{options.slides} slides, {int(training.labels.sum())} of them with a patch")
    for freeze in (True, False):
        print("frozen encoder" if freeze else "whole model")
        best = train(
            model, training, validation, freeze=freeze, epochs=options.epochs, patience=options.patience
        )
        print(
            f"{'frozen' if freeze else 'fine-tuned'}: epoch {best}, test AUC {evaluate(model, test)[1]:.3f}"
        )

    maps = encoder.attention_maps(test.tiles, test.coords, padding_mask=test.padding, rollout=True)[:, 0]
    print(f"attention of the patch: {share_of_patch(maps, test):.1f} times its share of the tiles")
    if options.heat_map is not None:
        slide, there = test.pick(torch.tensor(0)), ~test.padding[0]
        write_png(options.heat_map, heat_map(slide.coords[there], maps[0, there], TILE_SIZE, pixels=512))
        where = slide.coords[slide.planted] // TILE_SIZE - slide.coords[there].amin(0) // TILE_SIZE
        print(f"{options.heat_map}: the patch is at cells {where.tolist()}")


if __name__ == "__main__":
    main()
