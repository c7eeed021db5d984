"""The records that pass between stages: frozen, JSON on disk, one type a kind.

Text offsets count Unicode code points of `Page.text`, half-open [start, end).
A page is named by its URL key (`pipeline.urls.url_key`) everywhere but in `Page.url`.
"""

from typing import Any, Literal

from msgspec import Struct

Split = Literal["train", "heldout"]
Policy = Literal["base", "sft", "grpo"]
AnswerKind = Literal["date", "number", "name", "text"]
BucketName = Literal["too_easy", "easy", "medium", "hard", "too_hard"]
StopReason = Literal["answered", "turns", "tokens", "time", "context", "truncated", "no_answer", "error"]
"""Why a rollout ended.

answered: the model answered by itself. turns, tokens, time, context: that budget ran out (`Rollout.answer`
holds the forced final answer, if one came). truncated: the answer itself was cut. no_answer: the model
stopped without one. error: infrastructure failed; such a rollout says nothing about the model.
"""


VerdictState = Literal["judged", "open", "unparsed", "judge_error", "rollout_error"]
"""How a verdict came about.

judged: yes or no. open: the rules cannot tell and nobody else was asked. unparsed: the judge said nothing readable.
judge_error: the judge could not be reached. rollout_error: the rollout itself failed, so there is nothing to judge.
"""


class WarcPointer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the bytes of a page lie: byte offset and length of its record in a WARC file."""

    file: str
    offset: int
    length: int


class Link(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One anchor of a page."""

    url: str
    """Absolute target as the page names it, without fragment."""
    key: str
    anchor: str
    """The anchor's text, white space folded."""
    main: bool
    """Whether the anchor lies in the extracted main text."""
    nofollow: bool = False
    start: int | None = None
    """Offset of the anchor's text in `Page.text`; None outside the main text."""
    end: int | None = None


class Page(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fetched page, as every later stage and every tool sees it."""

    url: str
    """As fetched. Requests use this, never the key."""
    key: str
    host: str
    title: str
    text: str
    """Main text without markup; evidence is checked against this and the tools serve this."""
    links: tuple[Link, ...] = ()
    digest: str
    """SHA-256 (hex) of the decoded payload."""
    licence: str | None = None
    source: str | None = None
    canonical: str | None = None
    """The page's own rel=canonical, recorded and not trusted."""
    opt_outs: tuple[str, ...] = ()
    """Signals against use for AI training that the page carries, e.g. `noai`."""
    warc: WarcPointer | None = None


class Hop(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A main-text link from a seed page in the band to a fact page."""

    seed: str
    target: str
    anchor: str
    anchor_start: int
    anchor_end: int
    sentence_start: int
    sentence_end: int
    """The linking sentence in the seed page's text."""
    seed_percentile: float
    """Rank percentile of the seed among pages that have links, 0 = most popular, 1 = least."""
    target_percentile: float


class Evidence(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An exact span of a page's text."""

    page: str
    start: int
    end: int
    text: str


class PathStep(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tool call of a question's construction path."""

    tool: Literal["search", "visit"]
    arguments: dict[str, Any]
    """As a model would write them: `{"queries": [...]}` or `{"url": ..., "find": ...}`."""


class Admission(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was measured before a question was kept, all on the project's own index."""

    own_words_rank: int | None
    """Rank (from 1) of the answer's passage when searching the question's own words; None: not among the hits."""
    path_reaches: bool
    """Whether the construction path's tool output holds the evidence."""
    answer_on_seed: bool
    """Whether an accepted form of the answer already stands on the seed page."""
    same_cues_elsewhere: int
    """Other pages on which the cue words stand together with another fact of the same kind."""


class Question(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A question with what proves its answer."""

    id: str
    question: str
    answer: str
    kind: AnswerKind = "text"
    aliases: tuple[str, ...] = ()
    """Other accepted forms of the answer."""
    evidence: tuple[Evidence, ...] = ()
    hops: tuple[Hop, ...] = ()
    path: tuple[PathStep, ...] = ()
    """The calls that lead from the question to its evidence: material for SFT traces."""
    split: Split = "heldout"
    writer: str = "given"
    admission: Admission | None = None
    forbidden: tuple[str, ...] = ()
    """Normalised word n-grams of the question: a tool result that holds one leaks it."""


class ToolCall(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One call of a rollout, beside the messages that hold it."""

    turn: int
    name: str
    arguments: dict[str, Any] | None
    """None when the call could not be read."""
    outcome: Literal["ok", "empty", "malformed", "refused", "provider_error"]
    detail: str = ""
    latency_s: float = 0.0


class TokenSpan(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run [start, end) of `Rollout.token_ids` and the weight version that produced it."""

    start: int
    end: int
    version: str | None
    """None where no server said so (prompt and tool text)."""


class Usage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rollout used. Tokens as the server counted them; money in US dollars."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    tool_tokens: int = 0
    turns: int = 0
    seconds: float = 0.0
    dollars: float = 0.0


class Rollout(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One try at one question by one policy."""

    question_id: str
    repeat: int
    policy: str
    seed: int
    messages: tuple[dict[str, Any], ...]
    """OpenAI chat messages; `tool_calls[].function.arguments` is a JSON string."""
    tools: tuple[dict[str, Any], ...] = ()
    """OpenAI tool schemas, as the model saw them."""
    token_ids: tuple[int, ...] = ()
    """The whole conversation as the server saw it; empty where the endpoint returns no ids."""
    prompt_length: int = 0
    """Tokens before the first sampled one: the system and user turns."""
    mask: tuple[int, ...] = ()
    """1 where the model sampled the token, 0 for prompt and tool text; as long as `token_ids`."""
    log_probs: tuple[float, ...] = ()
    """Of each token under the policy that sampled it, 0.0 where mask is 0; as long as `token_ids`."""
    spans: tuple[TokenSpan, ...] = ()
    answer: str | None = None
    stop: StopReason
    error: str | None = None
    """What failed, when `stop` is error."""
    calls: tuple[ToolCall, ...] = ()
    usage: Usage = Usage()


class Verdict(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether a rollout's answer is right."""

    question_id: str
    repeat: int
    policy: str
    correct: bool | None
    """None when there is no verdict: counts neither way."""
    judge: str
    state: VerdictState = "judged"
    """`correct` is None in every state but judged."""
    confidence: float | None = None
    """What the answer itself claims, in percent; None when missing or unreadable."""
    reason: str = ""
    """The judge's words, or the rule that decided."""
    model: str | None = None
    prompt_digest: str | None = None
    attempts: int = 0
    tokens: int = 0
    dollars: float = 0.0


class Bucketed(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often a question was solved. The bucket is a function of the counts, which are kept."""

    question_id: str
    policy: str
    passed: int
    judged: int
    errors: int
    """Rollouts without a verdict, whatever the cause. passed <= judged; judged + errors = rollouts."""
    mean: float
    low: float
    high: float
    """Posterior mean and 95 % interval of the pass rate (Jeffreys prior Beta(1/2, 1/2))."""
    bucket: BucketName | None
    """None when too few rollouts were judged."""


class Trace(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A conversation for SFT."""

    id: str
    question_id: str
    origin: Literal["construction", "rollout"]
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]


class Task(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A question for GRPO."""

    id: str
    question: str
    answer: str
    kind: AnswerKind
    aliases: tuple[str, ...]
    bucket: BucketName
    passed: int
    judged: int
    forbidden: tuple[str, ...] = ()


class StepRollout(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rollout of GRPO: where it stood in its step and what it counted for."""

    step: int
    """Optimizer step it was sampled for, from 1."""
    slot: int
    """Which group of the step."""
    mark: str
    """right, wrong, over_budget, too_long, no_verdict, error or bad_tokens."""
    reward: float | None
    """None when it says nothing about the model."""
    advantage: float | None
    """None when its group was not trained."""
    trained: bool
    """Whether its sampled tokens were in the loss."""
    rollout: Rollout | None
    """None when the agent loop itself failed."""
    verdict: Verdict | None


class GrpoStep(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one optimizer step of GRPO did."""

    step: int
    version: str
    """Weight version on the servers after the step."""
    sampled_version: str
    """The version its rollouts were to be sampled with."""
    stale_share: float
    """Share of sampled tokens that another version produced."""
    reward_mean: float | None
    """Over all rollouts with a verdict, those of groups without a signal included."""
    rollouts: int
    groups: int
    """Groups that were trained on."""
    groups_tried: int
    all_right: int
    all_wrong: int
    """Groups without a spread, by kind; replaced by further tasks while rounds last."""
    groups_lost: int
    """Groups left with fewer than two verdicts or with no trainable rollout."""
    backfilled: int
    """Rollouts sampled again in place of lost ones."""
    marks: dict[str, int]
    calls_mean: float | None
    """Tool calls a rollout."""
    trained_rollouts: int
    trained_tokens: int
    loss: float | None
    """None when it was no finite number."""
    grad_norm: float | None
    """None when there was no gradient or no finite one; the optimizer was not touched then."""
    learning_rate: float
    log_ratio_abs_mean: float | None
    """Mean |log p_trainer - log p_server| over trained tokens before the update; only numerics differ then."""
    log_ratio_std: float | None
    clip_share: float | None
    entropy: float | None
    """Nats a token."""
    kl_budget: float | None = None
    """Mean KL in nats a token that the step was allowed to move the policy by. None, as in the next three, without KL control."""
    kl_predicted: float | None = None
    """KL of the whole step, predicted before it was taken."""
    kl_realised: float | None = None
    """Exact KL of the share that was taken, on the same rollouts."""
    step_scale: float | None = None
    """Share of the whole step that was taken."""
    changed: int
    total: int
    """Weight elements whose BF16 bits changed, of all."""
    bytes: int
    """Bytes sent to the servers for the update."""
    site_bytes: int | None = None
    """Bytes that the trainer sent to the servers' site by sketch sync; None without it."""
    sketched: int | None = None
    """Weights that went to the site as sketches and not as deltas."""
    rollout_s: float
    train_s: float
    refit_s: float


class Failure(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An item that was dropped or failed, kept with its reason."""

    stage: str
    item: str
    reason: str
    """A short closed word, e.g. `thin`: failures are counted by it."""
    detail: str = ""
