"""Marks for `torch.compile` that are set without importing it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.core.tracing import constant_result, uncompiled


def test_the_marks_are_those_of_torch() -> None:
    def function() -> int:
        return 1

    theirs: Any = torch.compiler.disable(function)
    assert theirs._torchdynamo_disable
    assert uncompiled(function)._torchdynamo_disable  # type: ignore[attr-defined]
    marked: Any = torch.compiler.assume_constant_result(lambda: 1)
    assert marked._dynamo_marked_constant
    assert constant_result(function)._dynamo_marked_constant  # type: ignore[attr-defined]


def test_neither_the_function_nor_what_it_calls_is_compiled() -> None:
    compiling = []

    def inner(x: Tensor) -> Tensor:
        compiling.append(torch.compiler.is_compiling())
        return x * 2

    @uncompiled
    def outer(x: Tensor) -> Tensor:
        """Doubles."""
        return inner(x)

    frames = []

    def backend(graph: Any, _inputs: Any) -> Any:
        frames.append(graph)
        return graph.forward

    @torch.compile(backend=backend)
    def run(x: Tensor) -> Tensor:
        return outer(x + 1) + 1

    x = torch.ones(3)
    assert torch.equal(run(x), 2 * (x + 1) + 1)
    assert torch.equal(outer(x), 2 * x)
    assert compiling == [False, False]
    assert len(frames) == 2  # before and after, but nothing of what is in between
    assert (outer.__name__, outer.__doc__) == ("outer", "Doubles.")
