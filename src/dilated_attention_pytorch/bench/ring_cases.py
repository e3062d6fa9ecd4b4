"""WHAT is measured of attention over several ranks: cases and their targets. Plain data, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from ..spec import DilatedSpec

STRATEGIES = ("ring", "ulysses")


@dataclass(frozen=True)
class RingConfig:
    """The attention of a case: heads, head size and branches. One branch has rate 1."""

    h: int
    d: int
    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    dtype: str = "float32"
    is_causal: bool = False

    @property
    def spec(self) -> DilatedSpec:
        return DilatedSpec(self.segment_lengths, self.dilation_rates, self.is_causal)


@dataclass(frozen=True)
class RingTimeCase:
    """Time of `num_ranks` ranks of one thread each over that of one process with as many threads.

    The same global work; the target is for every strategy.
    """

    name: str
    config: RingConfig
    n: int
    num_ranks: int = 2
    backward: bool = False
    target: float | None = None
    repeats: int = 5


@dataclass(frozen=True)
class RingMemoryCase:
    """Peak memory of the rank that needs most, times the number of ranks, over that of one rank alone.

    Inputs, results and scratch: all that a process adds to what it had before it made its tensors.
    """

    name: str
    config: RingConfig
    n: int
    ranks: tuple[int, ...] = (1, 2, 4)
    backward: bool = False
    target: float | None = None
    repeats: int = 1


@dataclass(frozen=True)
class RingStepsCase:
    """One process: `RingDilatedAttentionV2` of each ring size over `DilatedAttention`.

    The target is for the peak memory that a call adds to its inputs; time stands beside it.
    """

    name: str
    config: RingConfig
    n: int
    ring_sizes: tuple[int, ...] = (1, 2, 4, 8)
    backward: bool = False
    target: float | None = None
    repeats: int = 3


RingCase = RingTimeCase | RingMemoryCase | RingStepsCase
RING_KINDS: dict[str, type[RingCase]] = {
    "ring time": RingTimeCase,
    "ring memory": RingMemoryCase,
    "ring steps": RingStepsCase,
}

# The longest segments are longer than a shard, so that keys travel between all ranks.
_FAR = ((2048, 16384, 65536), (1, 4, 16))
_NEAR = ((2048, 4096, 8192), (1, 2, 4))
_SPEED = RingConfig(8, 64, *_FAR)
_LONG = RingConfig(8, 64, (2048, 16384, 262144), (1, 4, 64))
_LONG_LOW = RingConfig(8, 64, (2048, 16384, 262144), (1, 4, 64), "bfloat16")
_STEPS = RingConfig(8, 64, *_NEAR)
_STEPS_LOW = RingConfig(8, 64, *_NEAR, "bfloat16")
_QUICK = RingConfig(4, 16, (32, 128, 1024), (1, 2, 4))

RING_SUITE: tuple[RingCase, ...] = (
    RingTimeCase("two ranks, forward", _SPEED, 65536),
    RingTimeCase("two ranks, forward + backward", _SPEED, 65536, backward=True, target=1.15),
    RingMemoryCase("ranks, memory of forward", _LONG, 262144, target=1.15),
    RingMemoryCase("ranks, memory of forward + backward", _LONG, 262144, backward=True, target=1.15),
    RingMemoryCase(
        "ranks, memory of forward + backward in bfloat16", _LONG_LOW, 262144, backward=True, target=1.15
    ),
    RingStepsCase("steps, forward", _STEPS, 131072, target=1.05),
    RingStepsCase("steps, forward in bfloat16", _STEPS_LOW, 65536, target=1.05),
    RingStepsCase("steps, forward + backward", _STEPS, 65536, backward=True, target=1.05, repeats=2),
)
RING_QUICK: tuple[RingCase, ...] = (RingTimeCase("quick two ranks", _QUICK, 1024, backward=True, repeats=2),)


def describe_ring(case: RingCase) -> str:
    """The sizes of a case in a few words."""
    config = case.config
    branches = ", ".join(f"({w}, {r})" for w, r in config.spec.branches)
    causal = ", causal" if config.is_causal else ""
    sizes = f"b = 1, n = {case.n} in all, h = {config.h}, d = {config.d}, {config.dtype}"
    if isinstance(case, RingTimeCase):
        sizes += f", {case.num_ranks} ranks of 1 thread against 1 process of {case.num_ranks} threads"
    elif isinstance(case, RingMemoryCase):
        sizes += ", ranks of 1 thread"
    return f"{sizes}, branches {branches}{causal}"
