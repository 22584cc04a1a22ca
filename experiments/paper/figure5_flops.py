"""Figure 5 and appendix C of the ring attention paper: FLOPs of a data set when the context grows.

    python experiments/paper/figure5_flops.py

The paper's formula, (6h + s2) / (6h + s1), with the widths as printed and as the models have them;
then the exact count: causal pairs, K/V heads, the MLP's own width, logits. The printed 162.6 is at
3072 x 4096 tokens.
"""

from __future__ import annotations

from comparison import Row, show

from ringray.models.sizes import named

SHORT, LONG, M = 4 << 10, 3072 << 12, 1 << 20  # tokens
RANGE = "printed: 20 to 40"


def formula(h: int, context: int) -> float:
    """Returns the ratio of appendix C."""
    return (6 * h + context) / (6 * h + SHORT)


def counted(name: str, context: int) -> float:
    """Returns the ratio per token by the exact count of visible pairs."""
    model = named(name, {})
    long, short = (model.forward_flops(s) / s for s in (context, SHORT))
    return long / short


def rows() -> list[Row]:
    """Returns the numbers of the text, and what they are with the right widths."""
    gpt3 = named("gpt3-175b", {})
    by_layers = gpt3.paper_flops(LONG) / LONG * SHORT / gpt3.paper_flops(SHORT)
    return [
        Row("175B, 4k to 10M", 162.6, by_layers, "10M is 3072 x 4096 tokens"),
        Row("175B, 4k to 10M, 10 x 1024²", 162.6, formula(12288, 10 * M), "its x-axis"),
        Row("175B, 4k to 10M, exact, causal", 162.6, counted("gpt3-175b", LONG), "half the pairs"),
        Row("7B, 4k to 1M", None, formula(4096, M), RANGE),
        Row("13B, 4k to 1M, h = 5140 as printed", None, formula(5140, M), RANGE),
        Row("13B, 4k to 1M, h = 5120", None, formula(5120, M), RANGE),
        Row("33B, 4k to 1M, h = 7168 as printed", None, formula(7168, M), RANGE),
        Row("33B, 4k to 1M, h = 6656", None, formula(6656, M), RANGE),
        Row("65B, 4k to 1M", None, formula(8192, M), RANGE),
        Row("7B, 4k to 1M, exact, causal", None, counted("llama-7b", M), RANGE),
        Row("1TB, 4k to 100M", None, formula(36864, 100 * M), ""),
    ]


if __name__ == "__main__":
    show("Figure 5: FLOPs of a token over those at 4k", rows(), "ratio")
