"""The sections of a spec: each field with its kind, its default and its meaning.

The checks, the error texts and the JSON Schema follow from them. A list where one value is meant
measures each of its values.
"""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import BeforeValidator, Field, model_validator

from ringray import partition as partitions
from ringray import transport as transports
from ringray.base.redaction import UNPRINTABLE
from ringray.lab.kinds import baselines
from ringray.lab.kinds.baselines import BASELINES
from ringray.lab.search import METHODS
from ringray.lab.specs.domain_fields import BLOCKS, DOCUMENTS, TRANSPORT, WINDOW, Packed, Window
from ringray.lab.specs.fields import (
    BASE,
    CAP,
    RATE,
    SHARE,
    TRUTH,
    Fields,
    FloatsOrNull,
    Ints,
    IntsOrNull,
    Mismatch,
    Names,
    NamesOrNull,
    Several,
    duration,
    one_of,
    or_null,
    size,
    text,
    tokens,
    whole,
)
from ringray.lab.trial.metrics import METRICS
from ringray.models import sizes
from ringray.traffic.walk import BACKWARDS
from ringray_kernels.backends import BACKENDS
from ringray_kernels.dtypes import DTYPES

DTYPE_ALIASES = {dtype.short: name for name, dtype in DTYPES.items()}
DIRECTIONS = ("forward", "forward+backward")
ORDERS = ("topology", "given", "shuffled")
OBJECTIVES = tuple(metric.name for metric in METRICS.values() if metric.objective)

# The services that show results.
TRACKERS = ("mlflow", "wandb")
_EXPERIMENT = text(rf"[^{UNPRINTABLE}\t\n]+", "1 to 250 printable characters", 250)
_SCHEME = r"(?i:https?|wandb|sqlite|(postgresql|mysql|mssql)(\+[a-z0-9]+)?)"
_URI = text(
    rf"{_SCHEME}://[^{UNPRINTABLE}\t\n ]*", "http://HOST:PORT, sqlite:///PATH or a database", 2000
)
_PATH = text(rf"[^{UNPRINTABLE}\t\n]+", "a path", 4096)

Cut = int | str | None


class RingSection(Fields):
    """The ranks of one ring and their place."""

    size: Annotated[Ints, Several(whole(1, 4096))] = 2
    """Number of ranks in the ring."""
    device: Annotated[str, one_of(["auto", "cpu", "cuda"])] = "auto"
    """Device of each rank; auto takes GPUs if the cluster has them."""
    placement: Annotated[str, one_of(["pack", "spread", "strict-pack", "strict-spread"])] = "pack"
    """Placement of the ranks on nodes by Ray; the strict strategies fail if they cannot be met."""
    order: Annotated[Names, Several(one_of(ORDERS))] = "topology"
    """Order of the ranks along the ring. topology: by zone, rack and domain, node, and links of its
    GPUs; given: as Ray places them; shuffled: by measure.seed, for comparison."""
    threads: Annotated[Ints, Several(whole(1, 256))] = 1
    """CPU threads of each rank. The tuning kinds search among several values."""
    concurrent: Annotated[int | None, or_null(whole(1, 1024), "as many as disturb none")] = 1
    """Rings side by side, each on machines of its own; GPU rings that fit on one share it. A number
    is at most that many; more than one GPU ring may then share a machine's network. null: as many
    as have machines of their own, and one on a single machine."""
    idle_release: Annotated[float, duration(0, 86400)] = 60.0
    """Seconds for which an idle ring keeps its actors, and so its nodes. After the last trial, and
    before a trial that needs other ranks, the ring is released at once."""


class ProblemSection(Fields):
    """The attention to compute."""

    seq_len: Annotated[Ints, Several(tokens(1, 2**31 - 1))]
    """Global sequence length in tokens, over all ranks."""
    batch: Annotated[Ints, Several(whole(1, 65536))] = 1
    """Sequences per call."""
    heads: Annotated[Ints, Several(whole(1, 1024))] = 8
    """Query heads."""
    kv_heads: Annotated[IntsOrNull, Several(or_null(whole(1, 1024), "as many as heads"))] = None
    """K/V heads; heads must be a multiple of them. null: as many as heads."""
    head_dim: Annotated[Ints, Several(whole(1, 512))] = 64
    """Size of one head, in elements."""
    value_head_dim: Annotated[IntsOrNull, Several(or_null(whole(1, 512), "as head_dim"))] = None
    """Size of one head of v and of the result, in elements. null: as head_dim."""
    softcap: Annotated[FloatsOrNull, Several(or_null(CAP, "plain scores"))] = None
    """Scores s become softcap x tanh(s / softcap). null: they stay."""
    sinks: Annotated[bool | tuple[bool, ...], Several(TRUTH)] = False
    """true: a logit per query head, drawn by the seed, is in the softmax without a value."""
    alibi: Annotated[bool | tuple[bool, ...], Several(TRUTH)] = False
    """true: scores are biased by ALiBi, with slopes 2 ** (-8 h / heads) of heads h from 1 on."""
    dropout_p: Annotated[FloatsOrNull, Several(or_null(RATE, "none is dropped"))] = None
    """Share of weights that are dropped, by the seed and their positions. null: none is dropped."""
    dtype: Annotated[Names, Several(one_of(DTYPES, DTYPE_ALIASES))] = "bfloat16"
    """Type of q, k, v and the result; accumulators are always float32."""
    quantize: Annotated[NamesOrNull, Several(or_null(one_of(["fp8"]), "none"))] = None
    """fp8: q, k and v travel and are multiplied in 8 bits; forward only. null: as dtype."""
    causal: Annotated[bool | tuple[bool, ...], Several(TRUTH)] = True
    """true: a query sees no later position."""
    window: Annotated[int | Window | tuple[int | Window | None, ...] | None, Several(WINDOW)] = None
    """Positions before its own that a causal query sees; or {left: ..., right: ...}. null: all."""
    chunk: Annotated[IntsOrNull, Several(or_null(whole(1, 2**31 - 1), "no chunks"))] = None
    """Positions of a chunk; chunks begin with documents, a query sees its own. null: no chunks."""
    prefix: Annotated[IntsOrNull, Several(or_null(whole(0, 2**31 - 1), "no prefix"))] = None
    """First positions of each document that see each other both ways; needs causal. null: none."""
    global_tokens: Annotated[IntsOrNull, Several(or_null(whole(1, 2**31 - 1), "none"))] = None
    """First positions of each document that queries see beside their window or chunk, and that
    see all of it without causal. null: none."""
    shared_prefix: Annotated[IntsOrNull, Several(or_null(whole(1, 2**31 - 1), "none"))] = None
    """First positions of the sequence that queries see beside their document, window or chunk: a
    prompt with many answers. null: none."""
    documents: Annotated[Packed | tuple[Packed, ...], Several(DOCUMENTS)] = None
    """Packed documents: their number (of fixed, uneven lengths), lengths (tokens), or a table that
    lengths are drawn from by a seed. null: one."""
    direction: Annotated[Names, Several(one_of(DIRECTIONS))] = "forward+backward"
    """Passes to compute and time."""
    new_tokens: Annotated[IntsOrNull, Several(or_null(whole(1, 1 << 20), "1 to decode"))] = None
    """New tokens of a step of kind decode, the last of seq_len. null: 1, none in other kinds."""


class StrategySection(Fields):
    """The way in which the ring computes the attention."""

    partition: Annotated[Names, Several(one_of(["auto", *partitions.NAMES]))] = partitions.DEFAULT
    """Rule that deals positions to ranks; balanced deals for the mask. auto: the tuned choice, or
    zigzag; in kind strategy-tune each partition, with balanced where documents or chunks are."""
    transport: Annotated[Names, Several(TRANSPORT)] = transports.DEFAULT
    """The transport of K/V: a name, or a name with its number, as in hybrid:2 (ranks that exchange
    heads), double-ring:4 (ranks per node), allgather:2 (K/V heads at once). auto: the tuned choice,
    or ring; in kind strategy-tune each transport that fits the ring."""
    backward: Annotated[Names, Several(one_of(["auto", *BACKWARDS]))] = "auto"
    """Tensors that travel in the backward pass. planned: K/V start again from their owner, dK/dV
    follow. reverse: K/V return from their last rank. query-side: Q, dO and dQ travel, K/V stay.
    auto: planned, or with transport auto the tuned choice; in kind strategy-tune each of them."""
    backend: Annotated[Names, Several(one_of(["auto", *BACKENDS]))] = "auto"
    """Implementation of attention on one rank; auto takes the fastest for the device."""
    blocks: Annotated[Cut | tuple[Cut, ...], Several(or_null(BLOCKS, "tuned or default"))] = None
    """Block sizes of the backend. aten: query rows per fused call. triton: a text of forward=, dq=
    and dkv=, separated by commas (quote it in a list or in braces); each configuration is
    query rows x key rows / warps / stages, as in forward=128x64/8/2. null: the tuned choice, or
    the default."""


class Baseline(Fields):
    """The computation that the ring is compared with, measured in turns with it."""

    name: Annotated[str, one_of(BASELINES)] = baselines.DEFAULT
    """sdpa: PyTorch's scaled_dot_product_attention, flex: its FlexAttention, each in one process.
    On the same ring, on GPUs: context-parallel is PyTorch's, ring-flash-attn the package."""
    threads: Annotated[int, whole(1, 256)] = 2
    """CPU threads of a baseline in one process."""


class MeasureSection(Fields):
    """The measurement of each point."""

    warmup: Annotated[int, whole(0, 100)] = 1
    """Runs before the first measured run."""
    repeats: Annotated[int, whole(1, 1000)] = 5
    """Measured runs."""
    replicas: Annotated[int, whole(1, 1000)] = 1
    """Trials of each point; the strategies of one problem take turns."""
    seed: Annotated[int, whole(0, 2**31 - 1)] = 0
    """Seed of the inputs."""
    baseline: Annotated[
        Baseline | None,
        BeforeValidator(
            lambda value: {"name": value} if isinstance(value, str) else value,
            json_schema_input_type=Baseline | Annotated[str, one_of(BASELINES)] | None,
        ),
    ] = Baseline()
    """Baseline to compare with; the name alone is enough. null: none."""


class SearchSection(Fields):
    """The points of the sweep to measure, and their order. Each problem on each ring size is
    searched by itself."""

    method: Annotated[
        str,
        one_of(METHODS),
        Field(
            description=" ".join(f"{name}: {method.summary}." for name, method in METHODS.items())
        ),
    ] = "grid"
    objectives: Annotated[tuple[str, ...], Several(one_of(OBJECTIVES), always=True)] = (
        "median_ms",
    )
    """Metrics that decide which point is best, the most important first."""
    budget: Annotated[float | None, or_null(SHARE, "a quarter")] = None
    """Runs that may be spent, as a share of the runs that measuring all points in full takes. null:
    a quarter; grid takes all."""
    seed: Annotated[int | None, or_null(whole(0, 2**31 - 1), "0")] = None
    """Seed of the methods random and optuna. null: 0."""

    @property
    def share(self) -> float:
        """Returns the budget, or its default."""
        if METHODS[self.method].exhaustive:
            return 1.0
        return 0.25 if self.budget is None else self.budget


class TrainSection(Fields):
    """The training of kind train: a model, its place on the ranks, and its data. ``problem`` has
    the tokens of a sequence, the sequences of a step (``batch``) and the type of computation."""

    model: Annotated[Names, Several(one_of(sizes.table(), also=sizes.PATH))] = "llama-tiny"
    """Sizes of the model: a name, or a path of its config.json or of a folder with one."""
    layers: Annotated[int | None, or_null(whole(1, 1024), "the model's")] = None
    """Layers. null: the model's, as for the sizes below."""
    hidden: Annotated[int | None, or_null(whole(1, 1 << 18), "the model's")] = None
    """Features of a token."""
    heads: Annotated[int | None, or_null(whole(1, 1024), "the model's")] = None
    """Query heads."""
    kv_heads: Annotated[int | None, or_null(whole(1, 1024), "the model's")] = None
    """K/V heads."""
    head_dim: Annotated[int | None, or_null(whole(2, 512), "the model's")] = None
    """Size of one head, in elements."""
    intermediate: Annotated[int | None, or_null(whole(1, 1 << 20), "the model's")] = None
    """Features inside the MLP."""
    vocab: Annotated[int | None, or_null(whole(2, 1 << 22), "the model's")] = None
    """Tokens of the vocabulary."""
    dp: Annotated[Ints, Several(whole(1, 4096))] = 1
    """Replicas, each with its share of the sequences of a step. The ring (CP) has the ranks that
    dp, tp and pp leave of ring.size."""
    tp: Annotated[Ints, Several(whole(1, 64))] = 1
    """Ranks among which heads and MLP are split (tensor parallelism)."""
    pp: Annotated[Ints, Several(whole(1, 256))] = 1
    """Stages of layers (pipeline parallelism)."""
    pool: Annotated[bool | tuple[bool, ...], Several(TRUTH)] = False
    """true: the ranks of dp are in the ring, too, and dp sequences are joined into one, whose
    documents choose their ring; partition balanced and transport direct, where none are given."""
    rope_theta: Annotated[float, BASE] = 10000.0
    """Base of the rotary embedding: the slowest pair of a head of D turns by rope_theta**(2/D - 1)
    a token. Longer contexts want a larger one."""
    scores: Annotated[Names, Several(one_of(get_args(sizes.Scores)))] = "blockwise"
    """whole: attention keeps the matrix of its scores, for comparison; without a ring."""
    mlp_rows: Annotated[IntsOrNull, Several(or_null(tokens(1, 2**31 - 1), "all, and kept"))] = 1024
    """Rows of the MLP at once, computed again in backward (blockwise). null: all, and kept."""
    kept: Annotated[Names, Several(one_of(get_args(sizes.Kept)))] = "input"
    """Tensors that a layer keeps for its backward pass: all; its input and the result of attention,
    so the ring does not run again; its input alone."""
    offload: Annotated[bool | tuple[bool, ...], Several(TRUTH)] = False
    """true: inputs of layers leave the device until their backward pass: to pinned host memory, of
    a CPU rank to its folder of temporary files ($TMPDIR). With kept: input or attention."""
    micro_batch: Annotated[int, whole(1, 4096)] = 1
    """Sequences of a replica that are computed at once; more than one without documents only."""
    steps: Annotated[int, whole(1, 1_000_000)] = 20
    """Steps of the training."""
    learning_rate: Annotated[float, RATE] = 1e-3
    """Learning rate after the first tenth of the steps; it falls to a tenth of it."""
    corpus: Annotated[NamesOrNull, Several(or_null(_PATH, "random tokens"))] = None
    """Files or folders of text or of .npy arrays of tokens; of a list all. null: random tokens."""
    tokenizer: Annotated[str | None, or_null(_PATH, "bytes")] = None
    """Folder of a Hugging Face tokenizer. null: each byte of text is a token."""
    examined: Annotated[
        IntsOrNull, Several(or_null(tokens(1, 2**31 - 1), "that of the training"))
    ] = None
    """Lengths of the sequences in which a task is examined after its training; of a list all. null:
    that of the training."""
    checkpoints: Annotated[str | None, or_null(_PATH, "none")] = None
    """Folder of checkpoints, which all ranks see; a training whose folder has one goes on from it,
    on any ranks. It needs a spec of one point. null: none."""
    save_every: Annotated[int, whole(1, 1_000_000)] = 100
    """Steps between checkpoints."""


class LimitsSection(Fields):
    """Limits at which a trial is given up. They do not change the identity of a sweep."""

    trial_timeout: Annotated[
        float | None, or_null(duration(1, 86400), "2 minutes, or longer if a trial needs it")
    ] = None
    """Longest time of one trial, in seconds. null: 10 times the predicted time of the longest
    trial, baseline included, and at least 120 s; if 50 times its own predicted time is less, a
    trial is stopped after that, but not before 60 s."""
    retries: Annotated[int, whole(0, 10)] = 2
    """Number of retries of a trial after a fault that is not its own: the loss of a rank, its node
    or its connections."""
    rank_memory: Annotated[int | None, or_null(size(1 << 20, 64 << 40), "what the machine has")] = (
        None
    )
    """Bytes that a rank may use beyond its usage at the start of its first trial: writable memory
    on a CPU, but of a training its tensors; PyTorch's allocator on a GPU. A trial that needs more
    is out of memory. null: the memory of the machine."""
    place_timeout: Annotated[float, duration(1, 86400)] = 600.0
    """Longest wait of a ring for its place, in seconds: until other work on the cluster ends or
    nodes start. It does not run while nodes boot."""
    gpu_hours: Annotated[float | None, or_null(CAP, "no limit")] = None
    """Hours of GPUs, or of CPU ranks, for all trials of the sweep: the size of each ring times the
    time from its trial's begin to its end, attempts and earlier runs included. The sweep stops
    before the trial that would exceed them by its prediction."""


class TrackingSection(Fields):
    """The place where the results are shown. Does not change the identity of a sweep."""

    to: Annotated[str, one_of(TRACKERS)] = "mlflow"
    """Service that shows the results."""
    experiment: Annotated[str, or_null(_EXPERIMENT, "the name")] = Field(
        default="", json_schema_extra={"default": None}
    )
    """MLflow experiment. null: the spec's name."""
    uri: Annotated[str | None, or_null(_URI, "the environment's, or local")] = None
    """MLflow tracking URI. null: $MLFLOW_TRACKING_URI, or sqlite under $RINGRAY_HOME."""
    enabled: Annotated[bool, TRUTH] = True
    """true: log to MLflow. false: results stay in the store only."""

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        """Fills in the URI of a service other than MLflow, which begins with its name."""
        if not isinstance(data, dict) or data.get("to", "mlflow") not in TRACKERS[1:]:
            return data
        start = f"{data['to']}://"
        if not str(data.get("uri") or start).startswith(start):
            raise Mismatch(f"{start}... or null, with tracking.to: {data['to']}", place=("uri",))
        return {**data, "uri": data.get("uri") or start}
