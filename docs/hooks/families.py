"""Tables of the page on models from their config: names and families."""

from __future__ import annotations

from collections.abc import Callable

from choosing import table

from ringray.models import sizes
from ringray.models.config_json import families
from ringray.models.layers import LayerGroup

_STATES = {
    "gated_delta": "gated delta net",
    "kimi_delta": "Kimi delta attention",
    "mamba2": "Mamba-2",
    "mamba": "Mamba",
    "short_convolution": "short convolution",
}


def names() -> str:
    """Writes the models that are known by name."""
    rows = []
    for name, entry in sizes.table().items():
        model = sizes.named(name, {})
        count = f"{model.parameters / 1e9:.3g}"
        active = f"{model.active_parameters / 1e9:.3g}"
        layers = "; ".join(f"{group.count} {_kind(group)}" for group in model.groups)
        source = f"`{entry['from']}`: {entry['source']}" if "from" in entry else "`sizes.yaml`"
        rows.append([f"`{name}`", count, active if active != count else "", layers, source])
    return _table(["name", "10⁹ parameters", "of a token", "layers", "from: source"], rows)


def _kind(group: LayerGroup) -> str:
    """Writes what layers are made of."""
    parts = []
    if of := group.attention:
        heads = f"{of.heads}/{of.kv_heads} × {of.head_dim}"
        parts.append("latent attention " * bool(of.latent) + heads)
        parts += [f"window {of.window + 1}"] if of.window is not None else []
        parts += [f"chunk {of.chunk}"] if of.chunk else []
    parts += [state.kind for state in group.recurrences]
    if mlp := group.mlp:
        parts += [f"{mlp.experts} experts, {mlp.active} active"] if mlp.experts else []
        parts += [f"MLP {mlp.intermediate}"] if mlp.intermediate else []
    return ", ".join(parts)


def kinds() -> str:
    """Writes the families that are read, by ``model_type``."""
    rows = []
    for family, rules in sorted(families().items()):
        others = {"window": "windows", "chunk": "chunks"}.get(rules.get("others", ""), "")
        state = _STATES.get(rules.get("state", ""), "")
        default = rules.get("default", {})
        absent = ", ".join(f"`{name}` {str(value).lower()}" for name, value in default.items())
        rows.append([f"`{family}`", state or others, absent, rules.get("beside", "")])
    head = ["`model_type`", "beside full attention", "taken where absent", "not counted"]
    return _table(head, rows)


def _table(head: list[str], rows: list[list[str]]) -> str:
    return table(head, rows).replace("---:", "---")  # all columns are text


PARTS: dict[str, Callable[[], str]] = {"models by name": names, "families": kinds}
