"""Learning rates by step."""

from __future__ import annotations

import math


def cosine_rate(step: int, *, peak: float, steps: int, warmup_steps: int, final_share: float) -> float:
    """The learning rate of `step`, counted from 0: a linear rise, then half a cosine to `final_share * peak`.

    The first step has a rate above 0, and the last one, `steps - 1`, has exactly `final_share * peak`.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, steps - 1 - warmup_steps)
    share = 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
    return peak * (final_share + (1.0 - final_share) * share)
