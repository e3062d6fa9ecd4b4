"""Small random models of every family that the installed transformers has, and inputs for them."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

VOCAB, HIDDEN, HEADS, LAYERS, N, WINDOW = 96, 32, 4, 2, 19, 6
MOST_PARAMETERS = 20_000_000
Inputs = dict[str, Any]
Family = tuple[type[PreTrainedConfig], type[PreTrainedModel]]
# What a field's name says about it, and its small value; the first rule that matches a whole name holds.
SMALL: tuple[tuple[str, Any], ...] = (
    (r".*(dropout|drop|pdrop|drop_rate|drop_path|dropout_prob|dropout_p|layerdrop|_prob)", 0.0),
    (r"(text_|embedding_)?vocab_size(_per_layer_input)?|n_vocab|num_embeddings|.*_vocab_size", VOCAB),
    (r"(encoder_|decoder_|text_|vision_)?(hidden_size|d_model|n_embd|embed_dim|hidden_dim|dim)", HIDDEN),
    (r"word_embed_proj_dim|embedding_size|projection_dim|attention_hidden_size|mm_hidden_size", HIDDEN),
    (r"out_hidden_size|output_dim|text_embed_dim|dim_model|model_dim|emb_dim|input_embedding_size", HIDDEN),
    (r"(encoder_|decoder_|text_|vision_|num_|n_)*(attention_heads|heads|head)", HEADS),
    (r"(num_)?(key_value_heads|kv_heads|query_groups)|n_head_kv|num_key_value_heads", HEADS // 2),
    (r"(encoder_|decoder_|text_|num_|n_)*(hidden_layers|layers|layer|blocks|block)|depth", LAYERS),
    (r"head_dim|d_kv|attention_head_dim|qk_rope_head_dim|qk_nope_head_dim|v_head_dim|qk_head_dim", 8),
    (r"global_head_dim|swa_head_dim|swa_v_head_dim|rotary_dim|kv_channels", 8),
    (r"(encoder_|decoder_)?(ffn_dim|intermediate_size|d_ff|n_inner|ffn_hidden_size|feed_forward_size)", 48),
    (r"(shared_expert|expert|moe|mlp|dense|shared)_(intermediate|ffn_hidden|hidden)_(size|dim)", 48),
    (r"(q|kv|o)_lora_rank|index_head_dim|index_n_heads|attention_latent_dim|low_rank_dim", 8),
    (r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts", 4),
    (r"num_experts_per_(tok|token)|moe_topk|moe_k|top_k_experts|moe_router_topk|num_selected_experts", 2),
    (r"n_group|topk_group|num_expert_groups|n_shared_experts", 1),
    (r"max_position_embeddings|n_positions|max_seq_len|max_sequence_length|seq_length|block_size", 128),
    (r"max_(source|target)_positions|max_2d_position_embeddings|max_text_len", 128),
    (
        r"sliding_window(_size)?|attention_chunk_size|local_attention|window_size|attention_window_size",
        WINDOW,
    ),
    (r"(init|force|input|target)?_?image_size|img_size", 32),
    (r"patch_size", 8),
    (r"initializer_range|init_std|initializer_factor", 0.02),
    (r"mamba_d_state|ssm_state_size|state_size|mamba_n_groups|n_groups", 8),
    (r"num_mel_bins|n_mels", 16),
)
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
# Tried in this order until a model runs.
ATTEMPTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": HEADS},
    {"head_dim": None},
    {"head_dim": 128},  # rotary sections of images and text that add up to it
    {"num_hidden_layers": 6, "layer_types": None},
    {"hidden_size": 64, "head_dim": 16, "num_key_value_heads": HEADS},
)
SUFFIX = re.compile(r"(For[A-Z]\w+|LMHead|LMHeadModel|Model|Encoder|Decoder|Backbone)$")


class NotBuilt(Exception):
    """Why there is no small model of a family."""


def families(names: Collection[str] = ()) -> dict[str, Family]:
    """By name, the config class of a family and the model that stands for it.

    With `names` only their packages are imported, which may hold other families too.
    """
    import transformers.models as models
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    wanted = {model_type_to_module_name(name).replace("-", "_") for name in names}
    found: dict[type[PreTrainedConfig], list[type[PreTrainedModel]]] = {}
    for package in pkgutil.iter_modules(models.__path__):
        if wanted and package.name not in wanted:
            continue
        for module in pkgutil.iter_modules([f"{models.__path__[0]}/{package.name}"]):
            if module.name.startswith("modeling_"):
                for config, model in _models_of(f"transformers.models.{package.name}.{module.name}"):
                    found.setdefault(config, []).append(model)
    named: dict[str, Family] = {}
    for config, candidates in found.items():
        name = config.model_type or config.__name__
        named[config.__name__ if name in named else name] = (config, min(candidates, key=_rank(config)))
    return dict(sorted(named.items()))


def _models_of(path: str) -> Iterator[Family]:
    try:
        module = importlib.import_module(path)
    except ImportError:  # of a package that only this family needs
        return
    for name, model in vars(module).items():
        if not inspect.isclass(model) or not issubclass(model, PreTrainedModel):
            continue
        if model.__module__ != path or re.search("Pre[tT]rained|Wrapper", name):
            continue
        stems = (f"{name}Config", SUFFIX.sub("", name) + "Config")
        config = next((vars(module)[stem] for stem in stems if stem in vars(module)), model.config_class)
        if config is not None:
            yield config, model


def _rank(config: type[PreTrainedConfig]) -> Any:
    """Whole models before their parts, language models before bare ones."""
    order = ["ForCausalLM", "LMHeadModel", "ForMaskedLM", "Model", "ForConditionalGeneration", "Encoder"]
    if getattr(config, "is_encoder_decoder", False):
        order = ["ForConditionalGeneration", "Model"]

    def rank(model: type[PreTrainedModel]) -> tuple[int, int]:
        endings = [place for place, ending in enumerate(order) if model.__name__.endswith(ending)]
        return (endings[0] if endings else len(order), len(model.__name__))

    return rank


def tiny_config(config_class: type[PreTrainedConfig], **changes: Any) -> PreTrainedConfig:
    """A config of the class with everything small, and of its sub-configs too."""
    default = config_class()
    options: dict[str, Any] = {}
    for name, value in default.to_dict().items():
        small = _small(name, value)
        if small is not None:
            options[name] = small
        if name == "layer_types" and value:
            options[name] = _layer_types(value)
    for name in config_class.sub_configs:
        part = getattr(default, name, None)
        if isinstance(part, PreTrainedConfig):
            options[name] = tiny_config(type(part), **changes).to_dict()
    for name, value in changes.items():
        if name in options:
            options[name] = value
            if value is None:
                del options[name]
    return config_class(**options)


def _layer_types(default: list[str]) -> list[str]:
    """As many layers as there are now, with each of the first kinds."""
    kinds = list(dict.fromkeys(default))[:LAYERS]
    return (kinds * LAYERS)[:LAYERS]


def _small(name: str, value: Any) -> Any:
    if isinstance(value, (str, dict)) or value is True or value is False:
        return None
    if name in IDS:
        return IDS[name] if value is None or isinstance(value, (int, list)) else None
    if value is None:
        return None
    for pattern, small in SMALL:
        if re.fullmatch(pattern, name):
            return [small] * len(value) if isinstance(value, (list, tuple)) else small
    return None


def tiny_model(
    family: tuple[type[PreTrainedConfig], type[PreTrainedModel]],
) -> tuple[PreTrainedModel, Inputs]:
    """A model with eager attention and random weights in float32, and inputs that it takes."""
    config_class, model_class = family
    reasons = []
    for changes in ATTEMPTS:
        try:
            model = _build(model_class, tiny_config(config_class, **changes))
            return model, _first_that_runs(model)
        except Exception as error:  # whatever a config or a model says about sizes that do not suit it
            reasons.append(f"{type(error).__name__}: {error}")
    raise NotBuilt(reasons[0])


def _build(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    config._attn_implementation = "eager"
    if not hasattr(config, "pad_token_id"):
        config.pad_token_id = 0
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(config).parameters())
    if size > MOST_PARAMETERS:
        raise NotBuilt(f"still has {size:,} parameters")
    torch.manual_seed(0)
    model = model_class(config).float().eval()
    _fill(model)
    return model


def _first_that_runs(model: PreTrainedModel) -> Inputs:
    reasons = []
    for inputs in tiny_inputs(model):
        try:
            with torch.no_grad():
                model(**inputs)
            return inputs
        except Exception as error:  # of inputs that do not suit the model
            reasons.append(f"{type(error).__name__}: {error}")
    raise NotBuilt(reasons[0] if reasons else f"no inputs known for {model.main_input_name}")


def _fill(model: PreTrainedModel) -> None:
    """Weights of which attention is far from uniform, and outputs feel it."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.numel():
                parameter.normal_(0.0, min(0.2, 1.5 * parameter[0].numel() ** -0.5))
            elif not bool(torch.isfinite(parameter).all()):
                parameter.fill_(1.0)


def tiny_inputs(model: PreTrainedModel) -> list[Inputs]:
    """Inputs that may suit the model, in the order to try them."""
    torch.manual_seed(1)
    accepted = inspect.signature(model.forward).parameters
    text: dict[str, Any] = {"input_ids": torch.randint(3, VOCAB, (2, N))}
    size = _of_config(model, "image_size", 32)
    size = size if isinstance(size, int) else size[0] if isinstance(size, (list, tuple)) else 32
    image = {"pixel_values": torch.randn(2, _of_config(model, "num_channels", 3), size, size)}
    audio = {
        "input_features": torch.randn(2, _of_config(model, "num_mel_bins", 16), 64),
        "input_values": torch.randn(2, 4000),
    }
    choices: list[Inputs] = [text, image, {**text, **image}, *({name: audio[name]} for name in audio)]
    choices += [{"input_features": audio["input_features"].transpose(1, 2)}]
    choices += [{"input_values": torch.randn(2, 1, 4000)}]
    choices += [{name: torch.randn(2, N, HIDDEN)} for name in ("inputs_embeds", "hidden_states")]
    if "decoder_input_ids" in accepted:
        decoder = {"decoder_input_ids": torch.randint(3, VOCAB, (2, 7))}
        choices = [{**each, **decoder} for each in choices] + choices
    return [each for each in choices if all(name in accepted for name in each)]


def _of_config(model: PreTrainedModel, name: str, default: Any) -> Any:
    configs = [model.config, *(getattr(model.config, part, None) for part in model.config.sub_configs)]
    return next((getattr(each, name) for each in configs if getattr(each, name, None) is not None), default)


def padding(side: str) -> Tensor:
    """A mask (2, N) with padding on a side of the first row."""
    mask = torch.ones(2, N, dtype=torch.long)
    mask[0, slice(0, 6) if side == "left" else slice(N - 6, N)] = 0
    return mask
