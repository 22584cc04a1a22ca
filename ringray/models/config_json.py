"""Models from a ``config.json`` as Hugging Face writes it: sizes alone, no weights, no network.

What its model_type means is data (``families.yaml``). What a file does not say is in the model's
``assumptions``. Imports neither torch nor transformers.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

from ringray.base import private_files
from ringray.base.errors import UserError, unknown
from ringray.models.layers import Attention, Latent, LayerGroup, Mlp, Model, Product, Recurrence

FAMILIES = Path(__file__).with_name("families.yaml")
NAME = "config.json"
_MOST = 1 << 24  # that a size may be
_DELTA = 8  # FLOPs of an element of the state and a token: read, corrected, written, queried
_SCAN = 7  # as Megatron-LM counts both (github.com/NVIDIA/Megatron-LM, training.py)


def read(file: Path) -> Model:
    """Returns the model of a ``config.json``, or of a folder with one.

    Raises:
        UserError: no such file, no JSON object, an unknown family, fields that lack or contradict.
    """
    file = file / NAME if file.is_dir() else file
    try:
        with private_files.regular(file) as opened:
            facts = json.loads(opened.read())
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{file}: {reason}; expected a {NAME}, or a folder with one") from None
    if not isinstance(facts, dict):
        raise UserError(f"{file}: expected a JSON object, as Hugging Face writes it")
    name = file.absolute().parent.name if file.name == NAME else file.stem
    return of_facts(str(file), name, facts)


def of_facts(where: str, name: str, facts: Mapping[str, Any]) -> Model:
    """Returns the model ``name`` of the fields of a ``config.json``; ``where`` is in errors."""
    assumptions: dict[str, None] = {}
    text = facts.get("text_config")
    parts = [part for part in (facts, text) if isinstance(part, Mapping)]
    if any(part.get("quantization_config") is not None for part in parts):
        assumptions["quantization_config is left out: weights are trained in full"] = None
    if isinstance(text, dict):
        facts = {key: facts[key] for key in ("tie_word_embeddings",) if key in facts} | text
        assumptions["text_config alone: what encodes images or sound is left out"] = None
    # Kimi Linear has sizes in a section.
    if isinstance(section := facts.get("linear_attn_config"), dict):
        facts = {f"linear_{key}": value for key, value in section.items()} | dict(facts)
    prefix = "text_config." * isinstance(text, dict)
    return _Config(where, facts, assumptions, prefix).model(name)


@cache
def load(path: Path) -> dict[str, Any]:
    """Returns the content of a data file of this package."""
    import yaml

    # The parser in C is seven times as fast as the other, but not everywhere.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return cast("dict[str, Any]", yaml.load(path.read_text(encoding="utf-8"), loader))


def families() -> dict[str, dict[str, Any]]:
    """Returns what is known about each family, by model_type."""
    return cast("dict[str, dict[str, Any]]", load(FAMILIES)["families"])


@dataclass
class _Config:
    """Fields of a file by their most usual names, with defaults of the family. ``assumptions``:
    an ordered set; ``prefix``: what messages have before the name of model_type."""

    where: str
    facts: Mapping[str, Any]
    assumptions: dict[str, None]
    prefix: str = ""

    def __post_init__(self) -> None:
        self.family = str(self.facts.get("model_type"))
        if self.family not in families():
            message = unknown(f"{self.prefix}model_type", self.family, families())
            raise UserError(f"{self.where}: {message}")
        self.rules = families()[self.family]
        self.default = {"tie_word_embeddings": False, **self.rules.get("default", {})}
        for field, fine in load(FAMILIES)["refused"].items():
            if self.facts.get(field) not in fine:
                raise self.wrong(field, f"expected {' or '.join(map(json.dumps, fine))}")

    def wrong(self, field: str, expected: str) -> UserError:
        """Returns an error about a field, and what was read."""
        value = json.dumps(self.get(field))
        return UserError(f"{self.where}: {self._key(field)}: got {value}, {expected}")

    def _key(self, field: str) -> str:
        """Returns the name that the file has for a field."""
        field = self.rules.get("fields", {}).get(field, field)
        keys = (field, *load(FAMILIES)["names"].get(field, ()))
        return next((key for key in keys if key in self.facts), field)

    def get(self, field: str) -> Any:
        """Returns the value of a field, the family's default where it lacks, or None."""
        key = self._key(field)
        if key in self.facts:
            return self.facts[key]
        value = self.default.get(field)
        if value is not None:
            self.assume(field, value, f"the default of {self.family}")
        return value

    def assume(self, field: str, value: Any, why: str) -> None:
        """Adds an assumption about a field that lacks."""
        self.assumptions[f"{field} is not given: {json.dumps(value)}, {why}"] = None

    def optional(self, field: str, least: int = 0) -> int | None:
        """Returns an integer, or None."""
        return None if self.get(field) is None else self.size(field, least)

    def size(self, field: str, least: int = 1) -> int:
        """Returns an integer that the model needs."""
        value = self.get(field)
        if type(value) is not int or not least <= value <= _MOST:
            above = type(value) is int and value > _MOST
            bound = f"at most {_MOST:,}" if above else f"at least {least}"
            raise self.wrong(field, f"expected an integer of {bound}")
        return value

    def truth(self, field: str) -> bool:
        """Returns a truth value that the model needs."""
        value = self.get(field)
        if not isinstance(value, bool):
            raise self.wrong(field, "expected true or false")
        return value

    def entries(self, field: str, layers: int | None = None) -> list[Any] | None:
        """Returns a list, with an entry for each layer if they are given, or None."""
        values = self.get(field)
        if values is None:
            return None
        if field == "layer_types" and isinstance(values, str):
            values = [*values]  # the letters of Nemotron-H
        plain = isinstance(values, list) and all(isinstance(value, str | int) for value in values)
        if not plain or len(values) != (layers or len(values)):
            length = f", not of {len(values)}" if plain else ""
            raise self.wrong(field, f"expected a list of {layers or 'numbers of'} layers{length}")
        return cast("list[Any]", values)

    def model(self, name: str) -> Model:
        """Returns the model."""
        hidden = self.size("hidden_size")
        layers = self.optional("num_hidden_layers", 1) or len(self.entries("layer_types") or ())
        layers = layers or self.size("num_hidden_layers")
        kinds = zip(self._kinds(layers), self._sparse(layers), strict=True)
        groups = tuple(
            self._group(count, kind, sparse, hidden)
            for (kind, sparse), count in Counter(kinds).items()  # in the order of layers
        )
        attention = [group.attention for group in groups if group.attention]
        if not attention:
            raise self.wrong("layer_types", "expected a layer with attention")
        main = next((part for part in attention if part.window is part.chunk), attention[0])
        mlp = max(groups, key=lambda group: group.count * (group.mlp is not None)).mlp or Mlp(0)
        beside = [self.rules["beside"]] if "beside" in self.rules else []
        if biases := [field for field in load(FAMILIES)["biases"] if self.facts.get(field)]:
            beside.append(f"biases ({', '.join(biases)})")
        if beside:
            self.assumptions[f"not counted: {', '.join(beside)}"] = None
        positions = self.facts.get("max_position_embeddings")
        uniform = Model(
            name=name,
            layers=layers,
            hidden=hidden,
            heads=main.heads,
            kv_heads=main.kv_heads,
            head_dim=main.head_dim,
            intermediate=mlp.intermediate or mlp.expert_intermediate,
            vocab=self.size("vocab_size"),
            gated=mlp.gated,
            tied=self.truth("tie_word_embeddings"),
            heads_ahead=self.optional("num_nextn_predict_layers") or 0,
            positions=positions if isinstance(positions, int) else 0,
            assumptions=tuple(self.assumptions),
        )
        return uniform if uniform.groups == groups else replace(uniform, mixed=groups)

    def _kinds(self, layers: int) -> list[str]:
        """Returns the kind of each layer."""
        names: dict[str, str] = load(FAMILIES)["kinds"]
        if listed := self.entries("layer_types", layers):
            if not names.keys() >= set(listed):
                expected = f"expected num_hidden_layers = {layers} of {', '.join(names)}"
                raise self.wrong("layer_types", expected)
            return [names[name] for name in listed]
        others, full = self.rules.get("others", "full"), self.entries("attn_layer_indices")
        every, swapped = self.rules.get("full_every"), "swapped" in self.rules
        switched = "use_sliding_window" not in self.default or self.truth("use_sliding_window")
        # A window that is off, or has no size, is none.
        if others == "window" and not (switched and self.optional("sliding_window")):
            return ["full"] * layers
        if (counted := self.entries("linear_full_attn_layers")) is not None:
            full = [layer - 1 for layer in counted if isinstance(layer, int)]  # from 1 on
        elif "no_rope_layer_interval" in self.default and self.get("no_rope_layers"):
            # 0 where a layer has no rotary positions; an empty list means each n-th layer.
            flags = self.entries("no_rope_layers", layers) or ()
            full = [layer for layer, rotated in enumerate(flags) if not rotated]
        elif every:
            each = self.size(every)
            first = self.optional("attn_layer_offset")
            full = [*range(each - 1 if first is None else first, layers, each)]
        full = full or []
        if "max_window_layers" in self.default:
            end = self.optional("max_window_layers") or 0
            # Qwen2-MoE has windows in every other layer before it, others in all from it on.
            full = [*full, *range(end, layers)] if every else [*range(end)]
        return ["full" if (layer in full) != swapped else others for layer in range(layers)]

    def _sparse(self, layers: int) -> list[bool]:
        """Returns whether each layer has experts."""
        if not self.optional("num_experts"):
            return [False] * layers
        if listed := self.entries("mlp_layer_types", layers):
            return [name == "sparse" for name in listed]
        if (sparse := self.entries("moe_layers")) is not None:
            return [layer in sparse for layer in range(layers)]
        first, last = self.optional("first_k_dense_replace") or 0, self.get("moe_layer_end_index")
        step = self.optional("decoder_sparse_step", 1) or 1
        offset = self.optional("expert_layer_offset")
        with_experts = {*range(layers)[(step - 1 if offset is None else offset) :: step]}
        with_experts -= {*range(first), *(self.entries("mlp_only_layers") or ())}
        if last not in (None, -1):
            with_experts -= {*range(self.size("moe_layer_end_index") + 1, layers)}
        return [layer in with_experts for layer in range(layers)]

    def _group(self, count: int, kind: str, sparse: bool, hidden: int) -> LayerGroup:
        """Returns layers of one kind."""
        if kind in ("mlp", "moe"):
            return LayerGroup(count, None, self._mlp(kind == "moe"))
        mlp = None if "single" in self.rules else self._mlp(sparse)
        if kind == "state":
            return LayerGroup(count, self._state(hidden), mlp)
        beside = self._state(hidden) if "both" in self.rules else None
        return LayerGroup(count, self._attention(kind, hidden), mlp, beside)

    def _state(self, hidden: int) -> Recurrence:
        if "state" not in self.rules:
            raise self.wrong("layer_types", f"expected attention, as {self.family} has no states")
        return _STATES[self.rules["state"]](self, hidden)

    def _attention(self, kind: str, hidden: int) -> Attention:
        heads = self.size("num_attention_heads")
        if self.get("kv_lora_rank") is not None:
            rope = self.size("qk_rope_head_dim")
            latent = Latent(self.optional("q_lora_rank", 1), self.size("kv_lora_rank"), rope)
            sizes = self.size("qk_nope_head_dim") + rope, self.size("v_head_dim")
            self.assumptions["latent attention is expanded to K and V of each head"] = None
            return Attention(heads, heads, *sizes, latent=latent)
        kv_heads, head_dim = self.optional("num_key_value_heads", 1), self.optional("head_dim", 1)
        if kv_heads is None:
            kv_heads = heads
            self.assume("num_key_value_heads", heads, "as many as num_attention_heads")
        if heads % kv_heads:
            expected = f"expected a multiple of num_key_value_heads = {kv_heads}"
            raise self.wrong("num_attention_heads", expected)
        if head_dim is None:
            if hidden % heads:
                expected = f"expected a multiple of num_attention_heads = {heads}, or head_dim"
                raise self.wrong("hidden_size", expected)
            head_dim = hidden // heads
            self.assume("head_dim", head_dim, "hidden_size / num_attention_heads")
        # A window of Hugging Face counts the query's own key.
        window = self.size("sliding_window") - 1 if kind == "window" else None
        chunk = self.size("attention_chunk_size") if kind == "chunk" else None
        gated = "gate" in self.rules
        return Attention(heads, kv_heads, head_dim, head_dim, window, chunk, gated=gated)

    def _mlp(self, sparse: bool) -> Mlp:
        gated = self.rules.get("gated", True)
        if not sparse:
            width = self.size("intermediate_size")
            adjusted = "block_auto_adjust_ff_dim"
            if self.get(adjusted) and self.truth(adjusted):  # of LFM2, rounded up
                each, factor = self.size("block_multiple_of"), self.get("block_ffn_dim_multiplier")
                if not isinstance(factor, int | float) or not 0 < factor <= _MOST:
                    expected = f"expected a number above 0, at most {_MOST:,}"
                    raise self.wrong("block_ffn_dim_multiplier", expected)
                width = -(-int(factor * int(2 * width / 3)) // each) * each
            return Mlp(width, gated)
        experts, active = self.size("num_experts"), self.size("num_experts_per_tok")
        if active > experts:
            expected = f"expected at most {self._key('num_experts')} = {experts}"
            raise self.wrong("num_experts_per_tok", expected)
        width = self.size("moe_intermediate_size")
        shared = self.optional("shared_expert_intermediate_size")
        if shared is None:
            shared = (self.optional("n_shared_experts") or 0) * width
        return Mlp(0, gated, experts, active, width, shared)


def _gated_delta(config: _Config, hidden: int) -> Recurrence:
    """Gated delta net (arXiv 2412.06464): Q, K, V, an output gate and two numbers a head."""
    keys, values = config.size("linear_num_key_heads"), config.size("linear_num_value_heads")
    key, value = config.size("linear_key_head_dim"), config.size("linear_value_head_dim")
    ends = keys * key, values * value
    inputs = (2 * ends[0] + 2 * ends[1], 2 * values)
    channels, kernel = 2 * ends[0] + ends[1], config.size("linear_conv_kernel_dim")
    state, vectors = values * key * value, 2 * values + value
    return Recurrence(
        "gated delta", inputs, ends[1], channels, kernel, state, _DELTA, vectors=vectors
    )


def _kimi_delta(config: _Config, hidden: int) -> Recurrence:
    """Kimi delta attention (arXiv 2510.26692): a forget gate of each feature, of low rank."""
    heads, size = config.size("linear_num_heads"), config.size("linear_head_dim")
    width = heads * size
    kernel = config.size("linear_conv_kernel_dim")
    inputs, inner = (width, width, width, size, heads, size), (Product(size, width, "n"),) * 2
    state, vectors = width * size, width + heads + size
    return Recurrence("Kimi delta", inputs, width, 3 * width, kernel, state, _DELTA, inner, vectors)


def _mamba2(config: _Config, hidden: int) -> Recurrence:
    """Mamba-2 (arXiv 2405.21060): x, z, B, C and a step of each head."""
    heads, groups = config.size("mamba_n_heads"), config.size("mamba_n_groups")
    size, kernel = config.size("mamba_d_state"), config.size("mamba_d_conv")
    if config.get("mamba_expand") is not None:
        inner = config.optional("mamba_d_ssm") or config.size("mamba_expand") * hidden
        if inner % heads:
            raise config.wrong("mamba_n_heads", f"expected a divisor of the {inner} features")
    else:
        inner = heads * config.size("mamba_d_head")
    channels = inner + 2 * groups * size
    inputs, vectors = (inner + channels + heads,), channels + 3 * heads + inner
    return Recurrence(
        "Mamba-2", inputs, inner, channels, kernel, inner * size, _SCAN, vectors=vectors
    )


def _mamba(config: _Config, hidden: int) -> Recurrence:
    """Mamba (arXiv 2312.00752): B, C and a step of each feature, of low rank."""
    inner, size = config.size("mamba_expand") * hidden, config.size("mamba_d_state")
    auto = config.get("mamba_dt_rank") == "auto"
    rank = -(-hidden // 16) if auto else config.size("mamba_dt_rank")
    between = (Product(inner, rank + 2 * size, "k"), Product(rank, inner, "n"))
    kernel, vectors = config.size("mamba_d_conv"), inner * (size + 3)
    return Recurrence(
        "Mamba", (2 * inner,), inner, inner, kernel, inner * size, _SCAN, between, vectors
    )


def _short_convolution(config: _Config, hidden: int) -> Recurrence:
    """LFM2's gated convolution over a few tokens, without a state beside them."""
    kernel = config.size("conv_L_cache")
    return Recurrence("convolution", (3 * hidden,), hidden, hidden, kernel, 0, 0)


_STATES: dict[str, Callable[[_Config, int], Recurrence]] = {
    "gated_delta": _gated_delta,
    "kimi_delta": _kimi_delta,
    "mamba2": _mamba2,
    "mamba": _mamba,
    "short_convolution": _short_convolution,
}
