"""Settings of the LongNet models: plain data, validated once, written to JSON and read from it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from ..checks import (
    check_flags,
    check_positive,
    check_positive_int,
    check_probabilities,
    finite_float,
    one_of,
    parse_json,
    refuse_unknown,
)
from ..spec import DilatedSpec, resolve_branches
from .multihead import MULTIHEAD_KINDS
from .parts import ACTIVATIONS, CROSS_ATTENTIONS
from .positions import ENCODINGS

_PROBABILITIES = ("dropout", "attention_dropout", "activation_dropout", "drop_path_rate")
_CHOICES = {
    "activation": tuple(ACTIVATIONS),
    "kind": tuple(MULTIHEAD_KINDS),
    "position_encoding": ENCODINGS,
    "cross_attention": CROSS_ATTENTIONS,
}
# Arguments of attention modules and stacks that the models give themselves.
_NOT_OF_ATTENTION = {"batch_first", "cross_attention", "device", "dtype", "num_layers"}
_NOT_OF_ATTENTION |= {"embed_dim", "num_heads", "layer_norm"}
_DEEPEST = 32  # nesting of plain data
_Config = TypeVar("_Config", bound="StackConfig")
_Token = int  # from 0 on, unlike the sizes


@dataclass(frozen=True, kw_only=True, eq=False)
class StackConfig:
    """What all LongNet models have in common: the layers of `LongNetEncoder` and `LongNetDecoder`.

    The fields are the arguments of those classes. Without segment_lengths and dilation_rates they are those
    that `branches_for` gives for `max_length`, the longest sequence, or the defaults. `attention_options` go
    to the attention module of each layer. All values are plain data: numbers, strings, booleans, None, and
    sequences and mappings of them. Making one validates it, but for what only an attention module can judge.
    """

    model: ClassVar[str]  # the name of the class that these are the settings of
    other_names: ClassVar[tuple[str, ...]] = ()  # of arguments of the model, for hints
    is_plain: ClassVar[bool] = True  # False: attention options may be objects, as long as nothing is saved

    d_model: int = 768
    nhead: int = 12
    dim_feedforward: int = 3072
    max_length: int | None = None
    segment_lengths: Sequence[int] | None = None  # stored as tuples
    dilation_rates: Sequence[int] | None = None
    dropout: float = 0.0
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    drop_path_rate: float = 0.0
    activation: str = "gelu"
    layer_norm_eps: float = 1e-5
    sub_layer_norm: bool = True
    normalize_output: bool = True
    position_encoding: str | None = None
    num_kv_heads: int | None = None
    kind: str = "standard"
    gamma_init: float | None = None
    checkpoint_activations: bool = False
    attention_options: Mapping[str, Any] = field(default_factory=dict)

    def __init_subclass__(cls) -> None:
        cls.model = cls.__name__.removesuffix("Config")

    def __new__(cls, *_: Any, **given: Any) -> Any:
        refuse_unknown(cls.__name__, given, cls.names())
        return super().__new__(cls)

    def __post_init__(self) -> None:
        set_field = object.__setattr__  # the frozen dataclass' own way to store normalised values
        for each in fields(self):  # the annotations are strings here; a subclass may have them as types
            name, value = each.name, getattr(self, each.name)
            if each.type in ("int", int) or (name == "num_kv_heads" and value is not None):
                check_positive_int(name, value, bits=28)  # weights are counted in 64 bits
            elif each.type in ("bool", bool):
                check_flags(**{name: value})
            elif name in _PROBABILITIES:
                check_probabilities(**{name: value})
                set_field(self, name, float(value))
            elif name in _CHOICES and not (value is None and "None" in str(each.type)):
                one_of(name, value, _CHOICES[name])
        if self.d_model % self.nhead:
            raise ValueError(f"d_model must be a multiple of nhead, got {self.d_model} and {self.nhead}")
        if self.num_kv_heads is not None and self.nhead % self.num_kv_heads:
            raise ValueError(f"num_kv_heads must divide nhead, got {self.num_kv_heads} and {self.nhead}")
        given = (self.segment_lengths, self.dilation_rates, self.max_length)
        spec = DilatedSpec(*resolve_branches(*given, self.nhead))
        set_field(self, "segment_lengths", spec.segment_lengths)
        set_field(self, "dilation_rates", spec.dilation_rates)
        check_positive(layer_norm_eps=self.layer_norm_eps)
        if self.gamma_init is not None:
            check_positive(gamma_init=self.gamma_init)
        set_field(self, "attention_options", MappingProxyType(self._checked_options()))

    def _checked_options(self) -> dict[str, Any]:
        if not isinstance(self.attention_options, Mapping):
            raise TypeError(f"attention_options must be a mapping, got {self.attention_options!r}")
        options: dict[str, Any] = _plain("attention_options", self.attention_options, self.is_plain)
        if taken := sorted(options.keys() & {*_NOT_OF_ATTENTION, *self.names()}):
            raise ValueError(f"attention_options must be those of the attention modules, got {taken}")
        known = MULTIHEAD_KINDS[self.kind].option_names()
        refuse_unknown(self.model, options, known, (*self.names(), *self.other_names))
        return options

    @classmethod
    def names(cls) -> list[str]:
        """Of the fields."""
        return [each.name for each in fields(cls)]

    @classmethod
    def of(cls: type[_Config], **settings: Any) -> _Config:
        """The config of a model's keyword arguments: those that are no fields are attention options."""
        given = settings.pop("attention_options", {})
        own = {name: settings.pop(name) for name in cls.names() if name in settings}
        if isinstance(given, Mapping):  # else it is refused as it is
            given = {**given, **settings}
        return cls(**own, attention_options=given)

    def stack_options(self) -> dict[str, Any]:
        """The arguments of `LongNetEncoder` and `LongNetDecoder` but for the number of layers."""
        return {name: getattr(self, name) for name in StackConfig.names()}

    def to_dict(self) -> dict[str, Any]:
        """All fields, and under "model" what they are the settings of."""
        return {"model": self.model, **{name: _plain(name, getattr(self, name)) for name in self.names()}}

    def to_json(self) -> str:
        """`to_dict` as text, what config.json holds."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_dict(cls: type[_Config], values: Mapping[str, Any]) -> _Config:
        """The config of what `to_dict` gave: absent fields have their defaults, other keys are an error."""
        if not isinstance(values, Mapping):
            raise TypeError(f"a config must be a mapping of names to values, got {type(values).__name__}")
        if values.get("model") != cls.model:
            found = repr(values["model"]) if "model" in values else "no such key"
            raise ValueError(f'a {cls.__name__} must have "model": "{cls.model}", got {found}')
        if unknown := [name for name in values if name not in ("model", *cls.names())]:
            raise ValueError(f"a {cls.__name__} must not have other keys than its fields, got {unknown}")
        required = [x.name for x in fields(cls) if x.default is MISSING and x.default_factory is MISSING]
        if missing := [name for name in required if name not in values]:
            raise ValueError(f"a {cls.__name__} must have the keys {required}, got no {missing}")
        return cls(**{name: value for name, value in values.items() if name != "model"})

    @classmethod
    def from_json(cls: type[_Config], text: str) -> _Config:
        """The config of what `to_json` gave. Not a number, infinities and repeated keys are errors."""
        try:
            values = parse_json(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
        except json.JSONDecodeError as error:
            raise ValueError(f"a config must be JSON, got text that is not: {error}") from None
        return cls.from_dict(values)

    def __reduce__(self) -> tuple[Any, ...]:
        # A mapping proxy can be neither copied nor pickled; a copy shares objects such as process groups.
        return partial(type(self), **{**vars(self), "attention_options": dict(self.attention_options)}), ()

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash(self.to_json())


@dataclass(frozen=True, kw_only=True, eq=False)
class LongNetEncoderConfig(StackConfig):
    """Settings of `LongNetEncoder`: those of the layers, and their number."""

    is_plain: ClassVar[bool] = False

    num_layers: int = 12


@dataclass(frozen=True, kw_only=True, eq=False)
class LongNetDecoderConfig(StackConfig):
    """Settings of `LongNetDecoder`: those of the layers, their number, and whether they read an encoder."""

    is_plain: ClassVar[bool] = False

    num_layers: int = 12
    cross_attention: str | None = "dense"


@dataclass(frozen=True, kw_only=True, eq=False)
class LongNetConfig(StackConfig):
    """Settings of `LongNet`: those of the layers, their numbers, and how decoder reads encoder."""

    num_encoder_layers: int = 12
    num_decoder_layers: int = 12
    cross_attention: str = "dense"
    position_encoding: str | None = "rotary"


@dataclass(frozen=True, kw_only=True, eq=False)
class LongNetLMConfig(StackConfig):
    """Settings of `LongNetLM`: those of the layers, their number, and the tokens'.

    `pad_token` fills rows of generated tokens after their end; it is an ordinary token otherwise.
    """

    vocab_size: int
    num_layers: int = 12
    position_encoding: str | None = "rotary"
    tie_embeddings: bool = True
    pad_token: _Token = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        pad = self.pad_token
        if isinstance(pad, bool) or not isinstance(pad, int) or not 0 <= pad < self.vocab_size:
            raise ValueError(f"pad_token must be a token below vocab_size {self.vocab_size}, got {pad!r}")


def _plain(name: str, value: Any, is_plain: bool = True, depth: int = 0) -> Any:
    """A copy of plain data with dicts for mappings and tuples for sequences; else an error if `is_plain`."""
    if depth > _DEEPEST:
        raise ValueError(f"{name} must not nest more than {_DEEPEST} deep, got data that does")
    if isinstance(value, Mapping):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"{name} must have strings as keys, got {odd}")
        return {key: _plain(f"{name}[{key!r}]", each, is_plain, depth + 1) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(_plain(name, each, is_plain, depth + 1) for each in value)
    if isinstance(value, float):
        return finite_float(name, value)
    if is_plain and value is not None and not isinstance(value, (bool, int, str)):
        raise TypeError(f"{name} must be plain data, which a file can hold, got {type(value).__name__}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if repeated := sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1):
        raise ValueError(f"a config must not repeat keys, got {repeated}")
    return dict(pairs)


def _refuse_constant(text: str) -> float:
    raise ValueError(f"the numbers of a config must be finite, got {text}")
