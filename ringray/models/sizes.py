"""Sizes of decoders by name, by a ``config.json`` or by numbers.

The tables are data (``sizes.yaml``, ``configs.yaml``). Imports numpy only, no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ringray.base.errors import UserError, unknown
from ringray.models import config_json
from ringray.models.layers import Attention, LayerGroup, Mlp, Model, Product, Recurrence

__all__ = ["Attention", "LayerGroup", "Mlp", "Model", "Product", "Recurrence", "named", "table"]

# What a layer of a decoder keeps for its backward pass, the rest is computed again: everything; its
# input and the result of attention, so the ring does not run again; its input.
Kept = Literal["all", "attention", "input"]
Scores = Literal["blockwise", "whole"]  # of attention; whole: their matrix is kept

TABLE = Path(__file__).with_name("sizes.yaml")
CONFIGS = Path(__file__).with_name("configs.yaml")
PATH = r"[/~]|\.json$"  # what the paths of models have and their names have not
_REPOSITORY = r"\w[\w.-]*/[\w.-]+(?<!\.json)"  # OWNER/NAME of huggingface.co


@cache
def table() -> dict[str, dict[str, Any]]:
    """Returns what is known of each model by name: sizes, or the fields of its ``config.json``."""
    return {**config_json.load(TABLE), **config_json.load(CONFIGS)}


def named(name: str | None, changed: Mapping[str, int | None]) -> Model:
    """Returns the model of a name, or of a ``config.json`` or its folder, with ``changed`` sizes
    in place of its own, or one of sizes.

    A name may lack its family, then it is the latest Llama with that size: ``8b``, ``70b``; it may
    be that of a repository of huggingface.co: ``Qwen/Qwen3-8B``. Without a name, sizes that lack
    are as usual for layers, hidden and heads.

    Raises:
        UserError: unknown name, a size that lacks, heads that K/V heads do not divide, sizes beside
            a model whose layers differ, a file that is no model's.
    """
    sizes: dict[str, Any] = {key: value for key, value in changed.items() if value is not None}
    if name is None:
        lacking = [f"--{size}" for size in ("layers", "hidden", "heads") if size not in sizes]
        if lacking:
            raise UserError(f"MODEL: expected one of {', '.join(table())}, or {', '.join(lacking)}")
        hidden, heads = sizes["hidden"], sizes["heads"]
        usual = {"kv_heads": heads, "head_dim": max(1, hidden // heads), "vocab": 128256}
        usual["intermediate"] = -(-8 * hidden // (3 * 256)) * 256
        model = Model(**{"name": "these sizes", **usual, **sizes})
    else:
        model = _known(name)
        if model.mixed and (size := next((size for size in sizes if size != "vocab"), None)):
            expected = f"expected none beside {name}, whose layers have further sizes"
            raise UserError(f"{size}: got {sizes[size]}, {expected}")
        model = replace(model, **sizes)
    if model.heads % model.kv_heads:
        raise UserError(
            f"kv_heads: got {model.kv_heads}, expected a divisor of the {model.heads} heads"
        )
    return model


def _known(name: str) -> Model:
    """Returns the model of a name or a path."""
    folded, models = name.casefold(), table()
    short = {key.partition("-")[2]: key for key, entry in models.items() if "from" not in entry}
    on_hub = {entry["from"].casefold(): key for key, entry in models.items() if "from" in entry}
    key = {**short, **on_hub}.get(folded, folded)
    is_path, path = re.search(PATH, name), Path(os.path.expanduser(name))  # noqa: PTH111  no error
    if is_path and not path.exists() and re.fullmatch(_REPOSITORY, name) and key not in models:
        repositories = [entry["from"] for entry in models.values() if "from" in entry]
        others = "of another model give a folder with its config.json"
        raise UserError(f"{unknown('MODEL', name, repositories)}; {others}")
    if (is_path and path.exists()) or (key not in models and (is_path or path.is_dir())):
        return config_json.read(path)
    if key not in models:
        raise UserError(unknown("MODEL", name, (*models, *short)))
    entry = models[key]
    if "from" in entry:
        return config_json.of_facts(f"{CONFIGS.name}: {key}", key, entry)
    return Model(key, **{"kv_heads": entry["heads"], **entry})
