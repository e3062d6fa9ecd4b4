"""What a forecast is asked for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..plan import DEFAULT_WORKSPACE_BYTES, Pass, Plan, Shape, plan_dilated
from ..spec import DilatedSpec

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Call:
    """What is to be attended: sizes, numbers and passes."""

    shape: Shape
    dtype: torch.dtype
    spec: DilatedSpec
    train: bool = False
    layers: int = 1
    device: torch.device = CPU
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES

    @property
    def wide(self) -> int:
        """Bytes of an element of sums and lse."""
        return max(4, self.dtype.itemsize)

    @property
    def query_bytes(self) -> int:
        b, n, h, _, d = self.shape
        return b * n * h * d * self.dtype.itemsize

    @property
    def key_bytes(self) -> int:
        b, n, _, h_kv, d = self.shape
        return b * n * h_kv * d * self.dtype.itemsize

    @property
    def lse_bytes(self) -> int:
        b, n, h, _, _ = self.shape
        return b * n * h * self.wide

    @property
    def layer_bytes(self) -> int:
        """What a layer keeps for its backward: q, k, v, out and lse."""
        return 2 * self.query_bytes + 2 * self.key_bytes + self.lse_bytes

    def plan(self, direction: Pass) -> Plan:
        """The plan that the call itself would follow."""
        return plan_dilated(
            self.spec,
            self.shape,
            itemsize=self.dtype.itemsize,
            direction=direction,
            workspace_bytes=self.workspace_bytes,
        )
