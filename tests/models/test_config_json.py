"""Models from a config.json of Hugging Face, compared with the models that transformers makes."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringray.base.errors import UserError
from ringray.models import config_json
from ringray.models.sizes import Attention, LayerGroup, Mlp, Model, Recurrence, named, table
from tests.support.config_files import CHANGED, KINDS, LLAMA, built, kind, kinds, of


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers")


@pytest.mark.parametrize("family", sorted(config_json.families().keys() - {"kimi_k2"}))
def test_each_family_has_the_parameters_and_layers_of_transformers(
    transformers: Any, family: str
) -> None:
    sizes = {"num_hidden_layers": 6, **CHANGED.get(family, {})}
    config, parameters = built(
        transformers, family, **{name: size for name, size in sizes.items() if size is not None}
    )
    facts = json.loads(config.to_json_string(use_diff=False))
    model = config_json.of_facts("F", family, facts)
    exact = 5e-4 if "beside" in config_json.families()[family] else 4e-5
    assert model.parameters == pytest.approx(parameters, rel=exact)
    assert model.layers == config.num_hidden_layers
    # Transformers' own list of layers, and the same from the fields that it follows from.
    listed = getattr(config, "layer_types", None)
    if listed is None or family == "nemotron_h":
        return
    expected = Counter(KINDS[name] for name in listed)
    needed = family == "kimi_linear" or "layer_types" in CHANGED.get(family, {})
    short = {name: value for name, value in facts.items() if name != "layer_types" or needed}
    for each in (model, config_json.of_facts("F", family, short)):
        assert kinds(each) == expected


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 3}),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 3}),
        ("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 3}),
        ("qwen2_moe", {"use_sliding_window": True}),
        ("qwen3_moe", {"use_sliding_window": True, "max_window_layers": 3}),
        ("qwen3_moe", {"use_sliding_window": False}),
        ("mistral", {"max_window_layers": 3}),
        ("dots1", {"max_window_layers": 3}),
        ("dots1", {"max_window_layers": 3, "sliding_window": None}),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 64}),
        ("smollm3", {"use_sliding_window": True}),
        ("smollm3", {"sliding_window": 64}),
        (
            "smollm3",
            {
                "use_sliding_window": True,
                "sliding_window": 64,
                "no_rope_layers": [0, 0, 1, 1, 1, 1, 1],
            },
        ),
        ("llama4_text", {"no_rope_layers": []}),
        ("llama4_text", {"no_rope_layers": [0, 0, 1, 1, 1, 1, 1]}),
    ],
)
def test_fields_decide_which_layers_have_windows(
    transformers: Any, family: str, fields: dict[str, Any]
) -> None:
    config = transformers.CONFIG_MAPPING[family](num_hidden_layers=7, **fields)
    # Qwen3-MoE and Mistral have one mask for all layers.
    windowed = getattr(config, "sliding_window", None) is not None
    alike = "sliding_attention" if windowed else "full_attention"
    listed = getattr(config, "layer_types", None) or [alike] * 7
    beside = {"attention_chunk_size": 64, "intermediate_size_mlp": 64}
    model = of(model_type=family, num_hidden_layers=7, **beside, **fields)
    assert kinds(model) == Counter(KINDS[name] for name in listed)


@pytest.mark.parametrize("layers", [[1, 2], [0, 9], []])
def test_moe_layers_of_llama4_have_the_experts(transformers: Any, layers: list[int]) -> None:
    config, parameters = built(
        transformers, "llama4_text", num_hidden_layers=4, moe_layers=layers, num_local_experts=8
    )
    facts = json.loads(config.to_json_string(use_diff=False))
    model = config_json.of_facts("F", "it", facts)
    assert model.parameters == pytest.approx(parameters, rel=4e-5)
    sparse = sum(group.count for group in model.groups if group.mlp and group.mlp.experts)
    assert sparse == len({0, 1, 2, 3} & {*layers})


@pytest.mark.parametrize("family", sorted(config_json.families().keys() - {"kimi_k2"}))
def test_biases_that_a_file_adds_are_named(transformers: Any, family: str) -> None:
    sizes = {"num_hidden_layers": 6, **CHANGED.get(family, {})}
    changed = {name: size for name, size in sizes.items() if size is not None}
    config = transformers.CONFIG_MAPPING[family](**changed)
    facts = json.loads(config.to_json_string(use_diff=False))
    biases = {name: True for name, value in facts.items() if "_bias" in name and value is False}
    lines = config_json.of_facts("F", "it", facts).assumptions
    biased = config_json.of_facts("F", "it", facts | biases).assumptions
    assert all(name in biased[-1] for name in biases)
    assert all(name not in line for name in biases for line in lines)


@pytest.mark.parametrize("family", sorted(config_json.families().keys() - {"kimi_k2"}))
def test_defaults_of_families_are_those_of_transformers(transformers: Any, family: str) -> None:
    changed = {name: size for name, size in CHANGED.get(family, {}).items() if size is not None}
    layers = {"num_hidden_layers": 6} if "layer_types" in changed else {}
    config = transformers.CONFIG_MAPPING[family](**changed, **layers)
    default = {"tie_word_embeddings": False} | config_json.families()[family].get("default", {})
    # Not fields of the class, but what it does without them.
    of_code = ("sliding_window_pattern", "full_attention_interval", "n_shared_experts")
    for name, value in default.items():
        if name not in of_code and hasattr(config, name) and name not in changed:
            there = getattr(config, name)
            derived = value is None and name in ("head_dim", "mamba_d_ssm")
            unused = name in ("sliding_window",) and not getattr(config, "use_sliding_window", 1)
            assert there == value or derived or unused, name


@pytest.mark.parametrize("name", [name for name, entry in table().items() if "from" in entry])
def test_each_name_has_the_parameters_of_transformers(transformers: Any, name: str) -> None:
    facts = {key: value for key, value in table()[name].items() if key not in ("from", "source")}
    _, parameters = built(transformers, **{"family": facts.pop("model_type"), **facts})
    assert named(name, {}).parameters == pytest.approx(parameters, rel=5e-4)


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        # As their reports and model cards say: all parameters, those of a token.
        ("qwen3-0.6b", 0.6, 0.6),
        ("qwen3-8b", 8.2, 8.2),
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("qwen3-235b-a22b", 235, 22),
        ("gpt-oss-120b", 116.8, 5.7),
        ("gpt-oss-20b", 20.9, 4.2),
        ("deepseek-v3", 671, 37.5),
        ("mixtral-8x7b", 46.7, 12.9),
        ("granite4-h-small", 32.2, 8.8),
        ("nemotron3-nano-30b-a3b", 31.6, 3.6),
        ("kimi-linear-48b-a3b", 49.1, 3.5),
    ],
)
def test_parameters_are_the_published_ones(name: str, billions: float, active: float) -> None:
    model = named(name, {})
    assert model.parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert model.active_parameters / 1e9 == pytest.approx(active, rel=0.02)


def test_a_window_of_hugging_face_counts_the_query() -> None:
    model = of(model_type="mistral", sliding_window=4)
    (group,) = model.groups
    assert group.attention is not None
    assert group.attention.window == 3
    # Of 6 queries the first 4 see 1 to 4 keys, the others 4.
    assert group.attention.pairs(6) == 1 + 2 + 3 + 4 + 4 + 4


def test_flops_sum_groups_by_hand() -> None:
    hidden, context, attention = 64, 100, Attention(4, 2, 16, 8, window=9, gated=True)
    state = Recurrence("it", (96, 4), 32, 48, 3, 512, 8, vectors=7)
    moe = Mlp(0, True, experts=8, active=2, expert_intermediate=24, shared_intermediate=40)
    groups = (LayerGroup(3, attention, Mlp(128)), LayerGroup(2, state, moe))
    model = Model("it", 5, hidden, 4, 2, 16, 128, 1000, mixed=groups)
    # Q, K, V, gate, last; the MLP.
    first = hidden * (64 + 32 + 16 + 32) + 32 * hidden + 3 * hidden * 128
    expert = 3 * hidden * 24
    second = hidden * (96 + 4) + 32 * hidden + 3 * hidden * 40 + hidden * 8
    beside = 48 * 3 + 7
    ends = 2 * 1000 * hidden + hidden
    layers = 3 * (first + 2 * hidden) + 2 * (second + 8 * expert + beside + 2 * hidden)
    assert model.parameters == layers + ends
    assert model.active_parameters == model.parameters - 2 * 6 * expert
    state_flops = 2 * 48 * 3 + 8 * 512
    token = 3 * 2 * first + 2 * (2 * (second + 2 * expert) + state_flops) + 2 * hidden * 1000
    assert model.token_flops == token
    pairs = sum(min(row + 1, 10) for row in range(context))
    assert model.forward_flops(context) == context * token + 3 * 2 * (16 + 8) * 4 * pairs
    assert model.unlike == [
        "sliding_window",
        "a gate of attention",
        "num_experts",
        "linear attention or states",
    ]


@pytest.mark.parametrize(
    ("name", "kind", "state", "flops"),
    [
        # Heads x key x value, or heads x head dim x state; 2 for each tap of the convolution.
        ("qwen3-next-80b-a3b", "gated delta", 32 * 128 * 128, 8),
        ("kimi-linear-48b-a3b", "Kimi delta", 32 * 128 * 128, 8),
        ("nemotron-nano-9b-v2", "Mamba-2", 128 * 80 * 128, 7),
        ("granite4-h-small", "Mamba-2", 8192 * 128, 7),
    ],
)
def test_states_by_hand(name: str, kind: str, state: int, flops: int) -> None:
    model = named(name, {})
    (there,) = {part for group in model.groups for part in group.recurrences}
    channels = {
        "gated delta": 2 * 16 * 128 + 32 * 128,
        "Kimi delta": 3 * 32 * 128,
        "nemotron-nano-9b-v2": 128 * 80 + 2 * 8 * 128,
        "granite4-h-small": 8192 + 2 * 128,
    }
    taps = 2 * 4 * channels.get(kind, channels.get(name, 0))
    assert (there.kind, there.state) == (kind, state)
    assert there.flops == taps + flops * state


def test_latent_attention_is_expanded() -> None:
    model = named("deepseek-v3", {})
    attention = model.groups[0].attention
    assert attention is not None
    assert (attention.kv_heads, attention.head_dim, attention.value_dim) == (128, 192, 128)
    assert attention.latent_width == 1536 + 576
    assert model.heads_ahead == 1
    assert "latent attention is expanded to K and V of each head" in model.assumptions


def test_a_plain_file_is_a_plain_model(tmp_path: Path) -> None:
    folder = tmp_path / "Mine-1B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    model = named(str(folder), {})
    assert model == named(str(folder / "config.json"), {})
    assert model.mixed == ()
    assert replace(model, assumptions=()) == Model(
        "Mine-1B", 4, 512, heads=8, kv_heads=2, head_dim=64, intermediate=1024, vocab=1000
    )
    assert named(str(folder), {"layers": 2}).layers == 2


def test_names_of_today_mean_what_they_meant() -> None:
    assert named("8b", {}).name == "llama3-8b"
    assert named("70B", {}).name == "llama3-70b"
    assert named("7b", {}).name == "llama-7b"
    assert named("Qwen/Qwen3-8B", {}) == named("qwen3-8b", {})


def test_a_repository_that_is_not_known_is_no_missing_file() -> None:
    with pytest.raises(UserError, match=r"MODEL: got 'qwen/qwen4-8b'.* mean 'Qwen/Qwen3-8B'"):
        named("qwen/qwen4-8b", {})
    with pytest.raises(UserError, match="of another model give a folder"):
        named("meta-llama/Llama-3.1-8B", {})
    for path in ("./qwen/qwen4-8b", "qwen/config.json", "a/b/c"):
        with pytest.raises(UserError, match="No such file or directory"):
            named(path, {})


def test_text_models_of_others_are_read() -> None:
    text = {**LLAMA, "model_type": "gemma3_text", "sliding_window": 128, "num_hidden_layers": 6}
    del text["tie_word_embeddings"]
    model = config_json.of_facts("F", "it", {"model_type": "gemma3", "text_config": text})
    assert model.tied
    assert [(group.count, kind(group)) for group in model.groups] == [(5, "window"), (1, "full")]
    assert "text_config alone: what encodes images or sound is left out" in model.assumptions
    assert "head_dim is not given: 256, the default of gemma3_text" in model.assumptions


def test_quantization_is_left_out_wherever_it_is_told() -> None:
    line = "quantization_config is left out: weights are trained in full"
    quantized = {**LLAMA, "quantization_config": {"bits": 4}}
    assert line in config_json.of_facts("F", "it", quantized).assumptions
    outer = {"model_type": "llava", "text_config": quantized}
    assert line in config_json.of_facts("F", "it", outer).assumptions
    outer = {"quantization_config": {"bits": 4}, "text_config": LLAMA}
    assert line in config_json.of_facts("F", "it", outer).assumptions
    assert line not in of(quantization_config=None).assumptions


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "lama"}, "F: model_type: got 'lama'.*did you mean 'llama'"),
        ({"model_type": ...}, "F: model_type: got 'None', expected one of"),
        (
            {"model_type": ..., "text_config": {"hidden_size": 64}},
            r"F: text_config\.model_type: got 'None', expected one of",
        ),
        ({"vocab_size": 1 << 40}, "F: vocab_size: got 1099511627776, .* at most 16,777,216"),
        ({"hidden_size": ...}, "F: hidden_size: got null, expected an integer of at least 1"),
        ({"vocab_size": "1000"}, 'F: vocab_size: got "1000", expected an integer'),
        ({"vocab_size": True}, "F: vocab_size: got true, expected an integer"),
        ({"num_hidden_layers": 0}, "F: num_hidden_layers: got 0, expected"),
        ({"num_key_value_heads": 3}, "F: num_attention_heads: got 8, expected a multiple of .* 3"),
        ({"hidden_size": 500}, "F: hidden_size: got 500, expected a multiple of .* 8, or head_dim"),
        ({"tie_word_embeddings": "no"}, 'F: tie_word_embeddings: got "no", expected true or false'),
        (
            {"model_type": "qwen3", "layer_types": ["full_attention"] * 3},
            "F: layer_types: got .* expected a list of 4 layers, not of 3",
        ),
        (
            {"model_type": "qwen3", "layer_types": ["full_attention"] * 3 + ["none"]},
            "F: layer_types: got .*none.* expected .* of full_attention",
        ),
        (
            {"model_type": "qwen3", "layer_types": ["mamba"] * 2 + ["full_attention"] * 2},
            "F: layer_types: got .*qwen3 has no states",
        ),
        (
            {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 5},
            "F: num_experts_per_tok: got 5, expected at most num_local_experts = 4",
        ),
        (
            {
                "model_type": "olmo3",
                "sliding_window": None,
                "layer_types": ["sliding_attention"] * 4,
            },
            "F: sliding_window: got null, expected an integer",
        ),
        (
            {"model_type": "nemotron_h", "hybrid_override_pattern": "MX*-"},
            'F: hybrid_override_pattern: got "MX\\*-", expected num_hidden_layers = 4 of',
        ),
        (
            {"model_type": "nemotron_h", "moe_latent_size": 64},
            "F: moe_latent_size: got 64, expected",
        ),
    ],
)
def test_wrong_files_are_told_by_field(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        of(**changed)


@pytest.mark.parametrize("name", ["granite4-h-small", "kimi-linear-48b-a3b", "llama4-scout"])
@pytest.mark.parametrize(
    "odd", [None, "x", -1, 1.5, [1], ["x"], [[1]], {}, {"x": 1}, True, math.nan, math.inf]
)
def test_odd_values_are_errors_for_users(name: str, odd: Any) -> None:
    facts = {**table()[name], "full_attn_idxs": None, "block_auto_adjust_ff_dim": True}
    for field in (*facts, "hybrid_override_pattern", "text_config", "moe_layers", "no_rope_layers"):
        with suppress(UserError):
            config_json.of_facts("F", "it", {**facts, field: odd})


def test_files_that_are_no_config(tmp_path: Path) -> None:
    for path, content in (("a.json", "{"), ("b.json", "[]"), ("c.json", "[" * 100_000)):
        (tmp_path / path).write_text(content)
        with pytest.raises(UserError, match=rf"{path}: .*expected a"):
            named(str(tmp_path / path), {})
    os.mkfifo(tmp_path / "pipe.json")  # nobody writes into it
    for path in (tmp_path, tmp_path / "none.json", tmp_path / "pipe.json", "~nobody-here/x"):
        with pytest.raises(UserError, match=r"expected a config\.json, or a folder with one"):
            named(str(path), {})


def test_a_folder_here_needs_no_slash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mine", "8b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(LLAMA), "utf-8-sig")
    monkeypatch.chdir(tmp_path)
    assert named("mine", {}).hidden == named("./8b", {}).hidden == 512
    assert named("8b", {}).hidden == 4096


@pytest.mark.parametrize("factor", [math.nan, math.inf, 1e308, -1, 0, "1", None])
def test_widths_of_lfm2_take_a_factor_above_0(factor: Any) -> None:
    facts = {"layer_types": ["full_attention"] * 4, "block_multiple_of": 256}
    with pytest.raises(UserError, match=r"block_ffn_dim_multiplier: got .*a number above 0"):
        of(model_type="lfm2", **facts, block_ffn_dim_multiplier=factor)


def test_layers_of_several_kinds_take_no_sizes() -> None:
    with pytest.raises(UserError, match="layers: got 3, expected none beside gpt-oss-20b"):
        named("gpt-oss-20b", {"layers": 3})
    assert named("gpt-oss-20b", {"vocab": 512}).vocab == 512
