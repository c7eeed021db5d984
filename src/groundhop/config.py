"""Read a run's TOML into one typed, frozen value; refuse what is misspelt, mistyped or out of range."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from groundhop.errors import ConfigError, MissingError

Count = Annotated[int, Meta(ge=1)]
Whole = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]


class PagesConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[pages]`: where pages come from. At least one of the four sources."""

    warc: tuple[Path, ...] = ()
    jsonl: tuple[Path, ...] = ()
    """JSON lines with `url` and `html` (and maybe `licence`, `source_repo`), plain or `.zst`."""
    commoncrawl: tuple[str, ...] = ()
    """What to take from a Common Crawl release: hosts, `*.domain`, `host/path*` or addresses."""
    commoncrawl_release: Annotated[str, Meta(pattern=r"^(CC-MAIN-\d{4}-\d{2})?$")] = ""
    """The release, e.g. `CC-MAIN-2026-30`."""
    commoncrawl_ranks: Path | None = None
    """A host or domain rank file that more hosts are drawn from."""
    commoncrawl_band: tuple[Share, Share] = (0.0002, 0.01)
    """Percentiles of harmonic rank among all rows of that file: 0 is the most popular host."""
    commoncrawl_hosts: Count = 100
    """Hosts drawn from the band."""
    commoncrawl_pages_per_pattern: Count = 50
    """At most so many pages of each pattern and each drawn host, drawn evenly."""
    commoncrawl_index: tuple[Path, ...] = ()
    """Parquet files or folders of the columnar index; without any the index server is asked."""
    commoncrawl_cache: Path | None = None
    """Where the index server's answers are kept for later runs; None keeps them in this one's folder."""
    commoncrawl_index_url: str = "https://index.commoncrawl.org"
    commoncrawl_data_url: str = "https://data.commoncrawl.org"
    crawl: tuple[str, ...] = ()
    """Start addresses of a polite crawl."""
    crawl_pages: Count = 500
    """At most so many pages are fetched."""
    crawl_depth: Whole = 2
    same_host: bool = True
    """Follow links to the start addresses' hosts only."""
    pace_s: NotNegative = 1.0
    """Seconds between two requests to one host; a longer Crawl-delay wins."""
    user_agent: str = "groundhop"
    contact: str = ""
    """An address a site owner can write to; sent with the user agent."""
    max_bytes: Count = 5_000_000
    """Bodies that decode to more are refused."""
    allow_private: bool = False
    """Fetch loopback and private addresses. For tests and intranets."""
    min_chars: Whole = 200
    """Pages with less main text are kept as failures (`thin`)."""
    respect_opt_outs: bool = True
    """Leave out pages that opt out of AI training (noai, TDMRep)."""
    workers: Count = 2


class GraphConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[graph]`: ranks, and the band of middling popularity that seeds come from."""

    band: tuple[Share, Share] = (0.05, 0.95)
    """Rank percentiles among pages that have links: 0 is the most popular page."""
    min_words: Whole = 60
    """Pages with fewer words of main text are `thin`."""
    max_link_share: Share = 0.5
    """Pages whose main text is anchors to a greater share are lists: `list`."""
    max_rank_gap: Share = 0.9
    """Pages whose harmonic percentile lies so far below their PageRank percentile are `spam`."""
    max_pages_per_host: Count = 100_000
    """Pages of one host beyond so many are `host_cap`."""


class QuestionsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[questions]`: who writes them and which are kept."""

    writer: Literal["cloze", "llm"] = "cloze"
    limit: Count = 1_000_000
    """Stop after so many questions were kept in each split."""
    heldout_share: Share = 0.3
    """Share of the questions that are held out. No page serves both splits."""
    per_hop: Count = 2
    """At most so many questions, each on another fact, share one link."""
    per_seed: Count = 4
    per_target: Count = 4
    """At most so many questions share a seed or a target page."""
    same_host: bool = True
    """Whether hops inside one host count."""
    top: Count = 3
    """Hits that count as found when the question's own words are searched; what one search shows the agent."""
    cues: Count = 3
    """Cue words that describe the fact."""
    forms: tuple[Literal["date", "year", "number", "percent", "name"], ...] = ("date", "year", "number", "percent")
    """What the cloze writer asks for."""
    llm_url: str = ""
    """OpenAI-compatible base URL of the writer's model, e.g. `https://host/v1`."""
    llm_model: str = ""
    llm_key_env: str = "OPENAI_API_KEY"
    llm_temperature: NotNegative = 0.7
    llm_max_tokens: Count = 2048
    llm_concurrency: Count = 8


class SearchConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[search]`: what stands behind the agent's tools."""

    provider: Literal["local", "you"] = "local"
    top: Count = 3
    """Hits a query."""
    passage_words: Count = 90
    """Words of one passage of the local index."""
    snippet_tokens: Count = 60
    search_tokens: Count = 260
    """A search result is cut to so many tokens."""
    visit_tokens: Count = 260
    """A page view is cut to so many tokens."""
    replay: Literal["off", "live", "fallback", "strict"] = "live"
    you_url: str = "https://ydc-index.io"
    you_key_env: str = "YDC_API_KEY"
    requests_per_s: Positive = 8.0
    timeout_s: Positive = 30.0


class ModelConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[model]`: the policy before training."""

    name: str = "smollm2-135m-instruct"
    """`smollm2-135m-instruct` (built from a PyPI package), `tiny-random`, an HF folder or a hub name."""
    chat_template: Path | None = None
    """A Jinja file that replaces the model's own; built-in models bring one with tools."""


class ServeConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[serve]`: vLLM replicas of the policy."""

    replicas: Count = 1
    host: str = "127.0.0.1"
    port: Whole = 0
    """First port; 0 takes free ones."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    max_model_len: Count = 2048
    kv_cache_bytes: Count = 1_000_000_000
    """Per replica, CPU builds only."""
    max_num_seqs: Count = 32
    tensor_parallel: Count = 1
    gpu_memory: Share = 0.85
    eager: bool = True
    ready_s: Positive = 300.0
    extra: tuple[str, ...] = ()
    """More arguments for vLLM, as on its command line."""
    token_env: str = "GROUNDHOP_TOKEN"
    """Names the variable with the admin token; needed when `host` is not loopback."""


class AgentConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[agent]`: budgets of one rollout."""

    max_turns: Count = 6
    """Model turns, the forced final answer not counted."""
    max_tokens: Count = 1700
    """Tokens of the whole conversation."""
    turn_tokens: Count = 160
    """Sampled tokens of one turn."""
    max_time_s: Positive = 300.0
    temperature: NotNegative = 1.0
    top_p: Share = 1.0
    concurrency: Count = 32
    prompt: Path | None = None
    """System prompt file; None takes `agents/prompts/system.txt`."""


class JudgeConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[judge]`: who says whether an answer is right."""

    kind: Literal["exact", "llm", "exact_then_llm"] = "exact"
    llm_url: str = ""
    llm_model: str = ""
    llm_key_env: str = "OPENAI_API_KEY"
    max_tokens: Count = 1024
    attempts: Count = 4
    concurrency: Count = 16
    dollars_per_million_in: NotNegative = 0.0
    dollars_per_million_out: NotNegative = 0.0


class RolloutsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[rollouts]`: tries at the training questions, for buckets and traces."""

    repeats: Count = 8
    limit: Count = 1_000_000
    """At most so many questions, the first by id order."""
    base_limit: Whole = 1_000_000
    """The same for the untrained policy; 0 skips its rollouts."""


class BucketsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[buckets]`: from counts to difficulty."""

    min_judged: Count = 6
    """Questions with fewer judged rollouts get no bucket."""
    trainable: tuple[Literal["easy", "medium", "hard", "too_easy", "too_hard"], ...] = ("easy", "medium", "hard")
    traces_per_question: Count = 1
    """Right rollouts taken as SFT traces, fewest tool calls first."""
    construction: bool = True
    """Also make a trace from each question's construction path."""


class LograConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[sft.logra]` and `[grpo.logra]`: the sketching optimizer, where `optimizer = "logra"` (docs/logra.md)."""

    rank: Count = 64
    """Rows of a projection. More follow the gradient better and hold more memory."""
    variant: Literal["plain", "scaled"] = "plain"
    """`plain`: the learning rate is one of RowAdam. `scaled`: it is the share of the weights' norm that a step moves."""
    others: Literal["adamw", "frozen"] = "adamw"
    """What happens to embeddings, head and norms."""
    others_learning_rate: Positive | None = None
    """None: `learning_rate`."""
    refresh: Whole = 1
    """Optimizer steps between two draws of the projections; 0 keeps the first."""
    capture: Literal["activation", "gradient"] = "activation"
    """Where the sketch is taken: in the backward pass of each layer, or from its finished gradient."""


class SftConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[sft]`."""

    epochs: Positive = 1.0
    max_steps: int = -1
    batch: Count = 8
    micro_batch: Count = 4
    learning_rate: Positive = 2e-4
    warmup_share: Share = 0.05
    max_length: Count = 1536
    """Longer traces are dropped and counted, never cut."""
    bf16: bool = True
    checkpoint_steps: Count = 10
    """Optimizer steps between two checkpoints that a killed run goes on from."""
    max_grad_norm: Positive = 1.0
    optimizer: Literal["adamw", "logra"] = "adamw"
    logra: LograConfig = LograConfig()


class GrpoConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[grpo]`."""

    steps: Count = 12
    prompts: Count = 4
    """Groups an optimizer step trains on."""
    group: Annotated[int, Meta(ge=2)] = 8
    """Rollouts of one question."""
    learning_rate: Positive = 1e-5
    warmup_steps: Whole = 0
    clip_low: Positive = 0.2
    clip_high: Positive = 0.28
    kl_coefficient: NotNegative = 0.0
    temperature: Positive = 1.0
    refill_rounds: Whole = 2
    """Rounds of further questions sampled to replace groups without a signal or with lost members."""
    micro_batch: Count = 4
    max_length: Count = 2048
    bf16: bool = True
    checkpoint_steps: Count = 3
    max_grad_norm: Positive = 1.0
    optimizer: Literal["adamw", "logra"] = "adamw"
    logra: LograConfig = LograConfig()
    kl_budget: Positive | None = None
    """Mean KL (nats a token) that a step may move the policy, by prediction; larger steps are scaled down. None: no control."""
    kl_budget_end: Positive | None = None
    """Budget at the last step, reached along a cosine; None: `kl_budget`."""
    kl_scale_max: Positive = 1.0
    """Most that a step is multiplied by; 1 never enlarges one."""
    kl_probe: Count = 2
    """Rollouts of the step whose tokens the prediction is made on."""
    sync: Literal["delta", "sketch"] = "delta"
    """`sketch` (with LoGRA only): send a step as its integer factors where they are smaller than the delta."""


class EvaluateConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[evaluate]`: the held-out questions, before and after."""

    repeats: Count = 4
    limit: Count = 1_000_000
    temperature: NotNegative = 1.0
    policies: tuple[Literal["base", "sft", "grpo"], ...] = ("base", "sft", "grpo")
    bootstrap: Count = 10_000


class RunConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole run: one TOML file."""

    name: str
    seed: int = 0
    engine: Literal["local"] = "local"
    pages: PagesConfig = PagesConfig()
    graph: GraphConfig = GraphConfig()
    questions: QuestionsConfig = QuestionsConfig()
    search: SearchConfig = SearchConfig()
    model: ModelConfig = ModelConfig()
    serve: ServeConfig = ServeConfig()
    agent: AgentConfig = AgentConfig()
    judge: JudgeConfig = JudgeConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    buckets: BucketsConfig = BucketsConfig()
    sft: SftConfig = SftConfig()
    grpo: GrpoConfig = GrpoConfig()
    evaluate: EvaluateConfig = EvaluateConfig()


def load(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read `path` and apply overrides such as `grpo.steps=10`.

    Raises: MissingError without the file; ConfigError with the file's name and the key for anything else.
    """
    try:
        text = path.read_bytes()
    except (FileNotFoundError, IsADirectoryError) as error:
        raise MissingError(f"no config file {path}") from error
    try:
        tree = tomllib.loads(text.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    for override in overrides:
        _apply(tree, override)
    return convert(tree, where=str(path))


def convert(tree: dict[str, Any], where: str) -> RunConfig:
    """Turn a tree of plain values into a config. Raises: ConfigError that names the key."""
    try:
        config = msgspec.convert(tree, RunConfig, strict=True, dec_hook=_decode)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error
    low, high = config.graph.band
    if low >= high:
        raise ConfigError(f"{where}: need band[0] < band[1], got {low} and {high} - at `$.graph.band`")
    low, high = config.pages.commoncrawl_band
    if low >= high:
        raise ConfigError(f"{where}: need band[0] < band[1], got {low} and {high} - at `$.pages.commoncrawl_band`")
    if (config.pages.commoncrawl or config.pages.commoncrawl_ranks) and not config.pages.commoncrawl_release:
        raise ConfigError(f"{where}: name the release, e.g. CC-MAIN-2026-30 - at `$.pages.commoncrawl_release`")
    if config.grpo.sync == "sketch" and config.grpo.optimizer != "logra":
        raise ConfigError(f'{where}: sync = "sketch" needs optimizer = "logra" - at `$.grpo.sync`')
    return config


def _decode(kind: type, value: Any) -> Any:
    """TOML has no paths: take a string where a `Path` is wanted."""
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise TypeError(f"Expected `{kind.__name__.lower()}` as a string, got {value!r}")


def to_tree(config: RunConfig) -> dict[str, Any]:
    """The config as plain values, JSON types only."""
    tree: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(config, enc_hook=str))
    return tree


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` becomes `{"a.b": 1}`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"an override is written key.name=value, got {override!r}")
    *tables, last = key.strip().split(".")
    for table in tables:
        tree = tree.setdefault(table, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{table!r} in override {override!r} is not a table")
    tree[last] = _value(text.strip())


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
