"""Make the policies that the loop talks to: token in and token out for training, plain chat for anything else."""

from collections.abc import Sequence
from pathlib import Path

from groundhop.agents.api import ApiModel, ApiSettings
from groundhop.agents.chat import Call, ChatModel, Reply, Session, TokenRecord
from groundhop.agents.http_client import ReplicaClient
from groundhop.agents.template import TemplateCodec
from groundhop.agents.tokens import TokenModel

__all__ = [
    "ApiModel",
    "ApiSettings",
    "Call",
    "ChatModel",
    "Reply",
    "Session",
    "TokenModel",
    "TokenRecord",
    "make_api_model",
    "make_token_model",
]


def make_token_model(
    urls: Sequence[str],
    model_folder: Path,
    *,
    temperature: float,
    top_p: float,
    max_model_len: int,
    api_key: str | None = None,
    attempts: int = 6,
) -> TokenModel:
    """A policy served by vLLM at `urls` (without `/v1`); `model_folder` holds its tokenizer and chat template."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    client = ReplicaClient(urls, headers=headers, attempts=attempts)
    return TokenModel(client, TemplateCodec(model_folder), temperature=temperature, top_p=top_p, context=max_model_len)


def make_api_model(base_url: str, settings: ApiSettings, *, api_key: str | None = None, attempts: int = 6) -> ApiModel:
    """A policy behind an OpenAI-compatible endpoint; `base_url` ends in `/v1` or what stands in its place."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return ApiModel(ReplicaClient([base_url], headers=headers, attempts=attempts), settings)
