"""Values that an argument of a kind must refuse, by a label that says what is wrong with each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Bad = dict[str, Any]
HUGE = {"2**62": 2**62, "2**70": 2**70}
WORDS = {"a word": "nope", "a list": ["auto"], "a number": 7, "a tensor": torch.ones(2), "bytes": b"auto"}
NO_NUMBER = {"a string": "1", "a list": [1], "a tensor": torch.ones(2), "complex": 1j, "a bool": True}
NO_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def nothing(_: Any) -> Bad:
    """Of an argument that is tried elsewhere."""
    return {}


def size(_: Any) -> Bad:
    """Of a positive integer."""
    return {"zero": 0, "negative": -1, "a fraction": 1.5, **NO_NUMBER, **NO_FINITE, **HUGE}


def count(_: Any) -> Bad:
    """Of an integer of 0 and more."""
    return {"negative": -1, "a fraction": 1.5, **NO_NUMBER, **NO_FINITE, **HUGE}


def flag(_: Any) -> Bad:
    return {"a string": "yes", "one": 1, "zero": 0, "none": None, "a tensor": torch.ones(2) > 0, "a list": []}


def number(_: Any) -> Bad:
    return {**NO_NUMBER, **NO_FINITE, "10**400": 10**400}


def positive(_: Any) -> Bad:
    return {**number(_), "zero": 0.0, "negative": -1.0}


def probability(_: Any) -> Bad:
    return {**number(_), "negative": -0.1, "above one": 1.5}


def choice(_: Any) -> Bad:
    return WORDS


def integers(_: Any) -> Bad:
    """Of a sequence of positive integers."""
    lists = {
        "empty": [],
        "zeros": [0],
        "negative": [-1],
        "fractions": [1.5],
        "bools": [True],
        "nan": [math.nan],
    }
    lists |= {"strings": ["4"], "nested": [[4]], "2**62": [2**62], "2**70": [2**70]}
    tensors = {
        "a matrix": torch.tensor([[4, 8]]),
        "a column": torch.tensor([[4]]),
        "a bool tensor": torch.tensor([True]),
        "a float tensor": torch.tensor([4.0]),
        "a scalar tensor": torch.tensor(4),
        "a sparse tensor": torch.tensor([4]).to_sparse(),
        "a meta tensor": torch.tensor([4], device="meta"),
    }
    return {**lists, **tensors, "a number": 4, "a string": "48", "a set": {4}, "a dict": {4: 1}}


def device(_: Any) -> Bad:
    return {"a word": "nope", "a fraction": 1.5, "a list": ["cpu"]}


def dtype(_: Any) -> Bad:
    return {"a string": "float32", "integers": torch.int32, "a number": 7, "a tensor": torch.ones(2)}


def mapping(_: Any) -> Bad:
    return {"a word": "nope", "a number": 7, "a list": [1], "other keys": {"typo": 1}, "odd keys": {1: 1}}


def anything(_: Any) -> Bad:
    """Of an argument that takes objects of one class."""
    return {"a word": "nope", "a number": 7, "a list": [1], "a tensor": torch.ones(2)}


def tensor(x: Tensor) -> Bad:
    """Of a tensor like x; its own dtype and shape are all that is right."""
    other = x.float() if x.dtype == torch.int64 else x.long()
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
    return {
        "a list": x.tolist(),
        "a number": 7,
        "a word": "nope",
        "fewer dimensions": x[0],
        "more dimensions": x[None],
        "a scalar": x.flatten()[0],
        "longer": torch.cat([x, x], -1),
        "sparse": x.to_sparse(),
        "meta": x.to("meta"),
        "nested": nested.to(x.dtype),
        "of another kind": other,
        "complex": x.to(torch.complex64),
    }


def mask(x: Tensor) -> Bad:
    return {**tensor(x), "floats": torch.full(x.shape, 0.5)}


def optional(kind: Callable[[Any], Bad]) -> Callable[[Any], Bad]:
    """The same without None, which is right."""
    return lambda x: {label: value for label, value in kind(x).items() if value is not None}


def without(kind: Callable[[Any], Bad], *labels: str) -> Callable[[Any], Bad]:
    """A kind whose values of these labels are right."""
    return lambda x: {label: value for label, value in kind(x).items() if label not in labels}


def lists(_: Any) -> Bad:
    """Of integers from 0 on, one for each row: what is wrong with `integers`, but for its zeros."""
    return {**without(integers, "zeros")(_), "too large": [99], "too many": [1, 1]}


def bounds(_: Any) -> Bad:
    """Of cu_seqlens, a tensor."""
    good = torch.tensor([0, 8, 16])
    return {**tensor(good), "falling": torch.tensor([0, 9, 8, 16]), "short": torch.tensor([0, 8])}


def dims(_: Any) -> Bad:
    return {"outside": 7, "a fraction": 1.5, "a bool": True, "a string": "1", "2**70": 2**70}


def shapes(_: Any) -> Bad:
    wrong = {"negative": [-1], "fractions": [1.5], "strings": ["4"], "bools": [True]}
    return {**wrong, "huge": [2**40, 2**40], **HUGE}


def sequences(x: Tensor) -> Bad:
    return {"none": None, "a list": [1], "a scalar": x[0, 0, 0, 0], "sparse": x.to_sparse()}


def tokens(_: Any) -> Bad:
    sets = {"negative": [-1], "large": [99], "fractions": [1.5], "bools": [True]}
    return {"a number": 7, "a word": "nope", **sets}
