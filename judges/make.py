"""Choose a judge by the `[judge]` table."""

import os

from groundhop.config import JudgeConfig
from groundhop.errors import ConfigError, CredentialError
from groundhop.judges.llm import Endpoint, LlmJudge
from groundhop.judges.protocol import Judge
from groundhop.judges.rules import ExactJudge, ExactThenJudge


def make_judge(config: JudgeConfig) -> Judge:
    """The judge that a run's config names. Raises: ConfigError, CredentialError for an incomplete LLM judge."""
    match config.kind:
        case "exact":
            return ExactJudge()
        case "llm":
            return _llm(config)
        case "exact_then_llm":
            return ExactThenJudge(_llm(config))


def _llm(config: JudgeConfig) -> LlmJudge:
    for key in ("llm_url", "llm_model"):
        if not getattr(config, key):
            raise ConfigError(f"judge.kind = {config.kind!r} needs judge.{key}")
    key = os.environ.get(config.llm_key_env, "") if config.llm_key_env else ""
    if config.llm_key_env and not key:
        raise CredentialError(
            f"the judge's key is not there: set {config.llm_key_env}, or judge.llm_key_env = '' for none"
        )
    endpoint = Endpoint(
        url=config.llm_url,
        model=config.llm_model,
        key=key,
        max_tokens=config.max_tokens,
        attempts=config.attempts,
        dollars_in=config.dollars_per_million_in,
        dollars_out=config.dollars_per_million_out,
    )
    return LlmJudge(endpoint, concurrency=config.concurrency)
