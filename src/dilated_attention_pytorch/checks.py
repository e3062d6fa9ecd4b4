"""Every validator of the package: errors that state the rule and the fact, before anything runs.

Torch is imported where tensors are looked at, so that command lines can check numbers without it.
"""

from __future__ import annotations

import difflib
import inspect
import json
import math
import numbers
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_Function = TypeVar("_Function", bound=Callable[..., Any])
_MASKS = ("attention_mask", "attn_mask", "mask", "key_padding_mask")  # of other libraries and of modules
_EXECUTION = ("kernel", "workspace_bytes", "memory", "use_pattern_cache")


def float_dtypes() -> tuple[torch.dtype, ...]:
    """Of queries, keys and values."""
    import torch

    return torch.float16, torch.bfloat16, torch.float32, torch.float64


def autocasts(device: torch.device) -> bool:
    import torch

    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def autocast_inputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Casts as autocast casts for scaled_dot_product_attention: floating point except float64."""
    import torch

    tensors = (q, k, v)
    kind = torch.Tensor
    if not (isinstance(q, kind) and isinstance(k, kind) and isinstance(v, kind)):
        return tensors  # for check_inputs to reject
    if not autocasts(q.device):
        return tensors
    dtype = torch.get_autocast_dtype(q.device.type)
    q, k, v = (x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)
    return q, k, v


def named_keywords(function: _Function) -> _Function:
    """Refuses keywords that the function does not have with a hint at those that are meant."""
    owner = function.__qualname__.removesuffix(".__init__")
    known = inspect.signature(function).parameters.keys()

    @wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        refuse_unknown(owner, given, known)
        return function(*args, **given)

    return call  # type: ignore[return-value]


def refuse_forward_mode(name: str, *tensors: Tensor) -> None:
    """The custom op would drop a tangent without a word."""
    import torch
    from torch.autograd import forward_ad

    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):  # type: ignore[no-untyped-call]
        raise TypeError(f"{name} has no forward-mode derivative, got a tensor with a tangent")


def check_head_slice(head_slice: tuple[int, int], h: int, h_kv: int) -> None:
    """Validates (first, total) for h query heads that share h_kv key heads."""
    if not isinstance(head_slice, (tuple, list)) or [type(x) for x in head_slice] != [int, int]:
        raise TypeError(f"head_slice must be two integers (first, total), got {head_slice!r}")
    (first, total), group = head_slice, h // h_kv
    if total >= 2**31:
        raise ValueError(f"head_slice must have a total below 2**31, got {total}")
    if not 0 <= first <= total - h:
        raise ValueError(f"head_slice must hold first + {h} heads of q within total, got {tuple(head_slice)}")
    if first % group or total % group:
        rule = f"head_slice must not cut the {group} query heads that share a key head"
        raise ValueError(f"{rule}, got {tuple(head_slice)}")


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    least_length: int = 1,
    same_length: bool = True,
) -> None:
    """Validates the tensors of a call, all but the values of cu_seqlens."""
    import torch

    dtypes = float_dtypes()
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.is_nested or x.layout != torch.strided:
            check_dense(name, x)
        if x.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions (b, n, h, d), got shape {tuple(x.shape)}")
        if x.dtype not in dtypes:
            raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {x.dtype}")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must be on one device, got {q.device}, {k.device} and {v.device}")
    b, n, h, d = q.shape
    if n < least_length or h < 1 or d < 1:
        raise ValueError(f"q must have at least one position, head and feature, got shape {tuple(q.shape)}")
    alike = (k.shape[0], k.shape[1] if same_length else n, k.shape[3])
    if k.shape != v.shape or alike != (b, n, d):
        sizes = "b, n and d" if same_length else "b and d"
        raise ValueError(
            f"k and v must have the shape (b, n, h_kv, d) with the {sizes} of q, got "
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}"
        )
    if k.shape[2] < 1 or h % k.shape[2]:
        raise ValueError(f"the heads of q must be a multiple of those of k and v, got {h} and {k.shape[2]}")
    if key_mask is not None:
        _check_key_mask(q, key_mask)
    if cu_seqlens is not None:
        _check_cu_seqlens(q, cu_seqlens)


def check_new_tokens(name: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Validates the tensors of a decoding call, which has no gradient."""
    import torch

    check_inputs(q, k, v, None, None, same_length=False)
    if k.shape[1] < 1:
        raise ValueError(f"k must have at least one position, got shape {tuple(k.shape)}")
    if q.is_meta:
        raise ValueError(f"{name} needs tensors with values, got the meta device")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        rule = f"{name} has no gradient: call it under torch.no_grad() or torch.inference_mode()"
        raise ValueError(f"{rule}, got tensors that require one")


def check_kind(name: str, x: Tensor, kind: str, *dtypes: torch.dtype) -> None:
    import torch

    if not isinstance(x, torch.Tensor) or x.dtype not in dtypes:
        raise TypeError(f"{name} must be {kind} tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    check_dense(name, x)


def _check_key_mask(q: Tensor, key_mask: Tensor) -> None:
    import torch

    check_kind("key_mask", key_mask, "a bool", torch.bool)
    if key_mask.shape != q.shape[:2]:
        rule = f"key_mask must have the shape (b, n) = {tuple(q.shape[:2])}"
        raise ValueError(f"{rule}, got {tuple(key_mask.shape)}")
    if key_mask.device != q.device:
        raise ValueError(f"key_mask must be on the device of q, {q.device}, got {key_mask.device}")


def document_bounds(cu_seqlens: Tensor, n: int) -> tuple[int, ...]:
    """The boundaries of packed documents as numbers, checked."""
    bounds = tuple(cu_seqlens.tolist())
    check_bounds(bounds, n)
    return bounds


def check_bounds(bounds: tuple[int, ...], n: int) -> None:
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != n:
        raise ValueError(f"cu_seqlens must run from 0 to the sequence length {n}, got {_short(bounds)}")
    if any(following < bound for bound, following in pairwise(bounds)):
        raise ValueError(f"cu_seqlens must not decrease, got {_short(bounds)}")


def _short(values: tuple[int, ...]) -> str:
    return str(values) if len(values) <= 8 else f"({', '.join(map(str, values[:4]))}, ..., {values[-1]})"


def _check_cu_seqlens(q: Tensor, cu_seqlens: Tensor) -> None:
    import torch

    check_kind("cu_seqlens", cu_seqlens, "an int32 or int64", torch.int32, torch.int64)
    if cu_seqlens.dim() != 1:
        raise ValueError(f"cu_seqlens must have one dimension, got shape {tuple(cu_seqlens.shape)}")
    if cu_seqlens.device not in (q.device, torch.device("cpu")):
        rule = f"cu_seqlens must be on the cpu or on the device of q, {q.device}"
        raise ValueError(f"{rule}, got {cu_seqlens.device}")
    if q.shape[0] != 1:
        raise ValueError(f"cu_seqlens packs documents into a batch of 1, got a batch of {q.shape[0]}")


def whole_numbers(
    name: str, values: Sequence[int] | Tensor, num: int | None, largest: int, *, least: int = 0
) -> list[int]:
    """`num` integers (or, for None, any number but 0 of them) from `least` to `largest`, checked."""
    import torch

    if isinstance(values, torch.Tensor):
        if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
            raise TypeError(f"{name} must hold integers, got {values.dtype}")
        check_dense(name, values, needs_values=True)
        values = values.tolist()
    if not isinstance(values, (list, tuple, range)):
        raise TypeError(f"{name} must be a sequence or tensor of integers, got {values!r}")
    if num is None and not values:
        raise ValueError(f"{name} must have at least one entry, got none")
    if num is not None and len(values) != num:
        raise ValueError(f"{name} must have one entry for each of the {num} rows, got {len(values)}")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must hold integers, got {value!r}")
        if not least <= value <= largest:
            raise ValueError(f"{name} must lie between {least} and {largest}, got {value}")
    return list(values)


def positive_ints(name: str, values: Sequence[int], bits: int) -> tuple[int, ...]:
    if hasattr(values, "tolist"):  # or tensors of booleans and of one column would pass as integers
        values = _listed(name, values)
    if isinstance(values, (str, bytes, dict)) or not hasattr(values, "__getitem__"):
        raise TypeError(f"{name} must be a sequence of integers, got {values!r}")
    numbers = []
    for value in values:
        if isinstance(value, bool) or not (isinstance(value, int) or hasattr(value, "__index__")):
            raise TypeError(f"{name} must hold integers, got {value!r} of type {type(value).__name__}")
        numbers.append(operator.index(value))
    if not numbers:
        raise ValueError(f"{name} must name at least one branch, got none")
    if min(numbers) < 1:
        raise ValueError(f"{name} must be positive, got {tuple(numbers)}")
    if max(numbers) >= 2**bits:
        raise ValueError(f"{name} must be below 2**{bits}, got {tuple(numbers)}")
    return tuple(numbers)


def _listed(name: str, values: Any) -> Any:
    try:
        return values.tolist()
    except RuntimeError as error:
        rule = f"{name} must be a sequence of integers"
        raise TypeError(f"{rule}, got a {type(values).__name__} that cannot be read") from error


def finite_float(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, numbers.Real)):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    try:
        number = math.ldexp(float(value), 0)  # which is a constant to compilers, unlike the float itself
    except OverflowError:
        number = math.inf
    if not -math.inf < number < math.inf:
        raise ValueError(f"{name} must be finite, got {number}")
    return number


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def close_names(name: str, known: Iterable[str], most: int = 1) -> list[str]:
    """The known names that are nearest to one that is not known, whatever their case."""
    by_lower = {each.lower(): each for each in known}
    return [by_lower[each] for each in difflib.get_close_matches(name.lower(), by_lower, n=most)]


def did_you_mean(name: str, known: Iterable[str], most: int = 3) -> str:
    """A hint at the closest of the known names; empty if none is close."""
    close = close_names(name, known, most)
    return f" Did you mean {' or '.join(close)}?" if close else ""


def refuse_unknown(
    owner: str, given: Iterable[str], known: Iterable[str], others: Iterable[str] = ()
) -> None:
    """Raises for a given keyword that `owner` does not know; `others` are names that may be meant."""
    known = set(known)
    for name in given:
        if name in known:
            continue
        if name in _MASKS and "key_mask" in known:
            meant = "key_mask (b, n) bool, True = may be attended, is meant"
            raise TypeError(f"{owner} has no {name!r}; {meant}")
        if name in _EXECUTION and "execution" in known:
            raise TypeError(f"{owner} has no {name!r}; execution=Execution({name}=...) is meant")
        raise TypeError(f"{owner} has no {name!r}.{did_you_mean(name, sorted({*known, *others}), 1)}")


def keyword_names(made: type) -> frozenset[str]:
    """The keywords of a class, with those of the bases to which its constructors hand on what is left."""
    names: set[str] = set()
    for each in made.__mro__:
        if "__init__" not in vars(each):
            continue
        parameters = inspect.signature(vars(each)["__init__"]).parameters.values()
        names |= {x.name for x in parameters if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)}
        if all(x.kind != x.VAR_KEYWORD for x in parameters):
            break
    return frozenset(names - {"self"})


def parse_json(text: str | bytes, **hooks: Any) -> Any:
    """`json.loads`, to which JSON that nests too deeply is bad JSON like any other: a ValueError."""
    try:
        return json.loads(text, **hooks)
    except RecursionError:
        raise ValueError("JSON must not nest deeper than Python can follow, got text that does") from None


def check_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape as a tuple of sizes that are not negative."""
    sizes = tuple(shape) if isinstance(shape, Sequence) else (shape,)
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"shape must consist of integers, got {shape!r}")
        if size < 0:
            raise ValueError(f"shape must not be negative, got {tuple(sizes)}")
    return sizes


def check_alignment(alignment: int | None) -> None:
    if alignment is None:
        return
    check_positive_int("alignment", alignment)
    if alignment & (alignment - 1) or alignment > 2**30:
        raise ValueError(f"alignment must be a power of two up to 2**30, got {alignment}")


def check_flags(**flags: bool) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be a bool, got {flag!r}")


def check_device(device: torch.device | str | None) -> torch.device | None:
    """The device of a name; None stays None."""
    import torch

    try:
        return None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be a torch.device or the name of one, got {device!r}") from error


def check_dtype(dtype: torch.dtype) -> None:
    import torch

    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, got {dtype!r}")


def check_float_dtype(name: str, dtype: torch.dtype | None) -> None:
    """Raises unless it is None or a floating-point dtype."""
    import torch

    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"{name} must be a floating-point torch.dtype, got {dtype!r}")


def check_count(name: str, value: int, least: int = 0, bits: int = 62) -> None:
    """Raises unless it is an integer from `least` on and below 2**bits."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        rule = "a positive integer" if least == 1 else f"an integer of {least} or more"
        raise ValueError(f"{name} must be {rule}, got {value!r}")
    if value >= 2**bits:
        raise ValueError(f"{name} must be below 2**{bits}, got {value}")


def plain_int(value: Any) -> Any:
    """An integer of another library as one of Python; anything else as it is."""
    is_other = hasattr(value, "__index__") and not isinstance(value, int)
    return operator.index(value) if is_other else value


def check_positive_int(name: str, value: int, bits: int = 62) -> None:
    check_count(name, value, 1, bits)


def check_pool_size(name: str, value: int | None) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62
    if value is not None and not whole:
        raise ValueError(f"{name} must be an integer of 0 or more, or None, got {value!r}")


def check_dense(name: str, x: Tensor, *, needs_values: bool = False) -> None:
    """Raises for sparse and nested tensors and, where values are read, for those of the meta device."""
    import torch

    if x.is_nested or x.layout != torch.strided:
        kind = "a nested one" if x.is_nested else x.layout
        raise TypeError(f"{name} must be a dense tensor, got {kind}")
    if needs_values and x.is_meta:
        raise ValueError(f"{name} must have values, got a tensor on the meta device")


def check_positive(**values: float) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name} must be a number, got {value!r}")
        if not 0 < value <= sys.float_info.max:
            raise ValueError(f"{name} must be positive and finite, got {value}")


def check_probabilities(**values: float) -> None:
    for name, value in values.items():
        if not 0.0 <= finite_float(name, value) <= 1.0:
            raise ValueError(f"{name} must lie between 0 and 1, got {value}")


def share_of_one(name: str, value: float, rule: str = "must lie above 0 and at most at 1") -> float:
    """A number above 0 and at most 1, as a float."""
    share = finite_float(name, value)
    if not 0.0 < share <= 1.0:
        raise ValueError(f"{name} {rule}, got {share}")
    return share


def one_dropout(attention_dropout: float, dropout: float | None) -> float:
    """`dropout` and `attention_dropout` are two names of one option."""
    for value in (attention_dropout, dropout):
        if value is not None and not isinstance(value, (int, float)):
            return value  # for the spec to reject
    if dropout is not None and attention_dropout not in (0.0, dropout):
        rule = "dropout and attention_dropout are one option"
        raise ValueError(f"{rule}, got the two values {dropout} and {attention_dropout}")
    return attention_dropout if dropout is None else dropout
