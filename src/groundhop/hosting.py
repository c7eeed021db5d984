"""Keep the policy's servers running through a run, holding the weights that the current stage wants."""

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groundhop.runs import Run

if TYPE_CHECKING:
    from groundhop.agents.model import TokenModel
    from groundhop.agents.template import TemplateCodec
    from groundhop.agents.tools import Toolbox
    from groundhop.serve import Servers

logger = logging.getLogger(__name__)

MODEL_CACHE = Path("models")
"""Built-in models are made once, beside the runs."""


class PolicyHost:
    """Starts servers when a stage first needs them, puts other weights into them in place, stops them at the end."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._servers: Servers | None = None
        self._held: str | None = None
        self._codec: TemplateCodec | None = None
        self._base: Path | None = None
        self._loads = 0

    def __enter__(self) -> "PolicyHost":
        return self

    def __exit__(self, *_: object) -> None:
        if self._servers is not None:
            self._servers.stop()

    def base_folder(self) -> Path:
        """The untrained policy's HF folder; a built-in model is made on first use."""
        if self._base is None:
            from groundhop.training.models import prepare

            table = self._run.config.model
            self._base = prepare(table.name, MODEL_CACHE, table.chat_template)
        return self._base

    def folder_of(self, policy: str) -> Path:
        """A policy's HF folder. Raises: MissingError when that policy was not trained yet."""
        return self.base_folder() if policy == "base" else self._run.look(policy).output("model")

    def has(self, policy: str) -> bool:
        """Whether that policy's weights are there."""
        return policy == "base" or (self._run.root / policy / "done.json").exists()

    def urls(self, policy: str) -> list[str]:
        """Base URLs of servers that hold `policy`'s weights now."""
        folder = self.folder_of(policy)
        if self._servers is None:
            from groundhop.serve import Servers

            self._servers = Servers.start(folder, self._run.config.serve, self._run.root / "logs")
        elif self._held != policy:
            from groundhop.training.hotload.direct import load_checkpoint

            self._loads += 1
            asyncio.run(load_checkpoint(self._servers.urls, folder, self._loads, self._headers()))
        self._held = policy
        self._servers.check()
        return self._servers.urls

    def forget_weights(self) -> None:
        """Say that the servers hold weights of a training step, so that the next stage loads its own."""
        self._held = None

    def model(self, policy: str, temperature: float, top_p: float) -> "TokenModel":
        """The policy as the agent loop talks to it."""
        from groundhop.agents.model import make_token_model

        return make_token_model(
            self.urls(policy),
            self.folder_of(policy),
            temperature=temperature,
            top_p=top_p,
            max_model_len=self._run.config.serve.max_model_len,
            api_key=os.environ.get(self._run.config.serve.token_env) or None,
        )

    def refitter(self, policy: str, folder: Path) -> Any:
        """What puts a trainer's weights into the servers, which hold `policy` now."""
        from groundhop.training.hotload.refit import make_refitter

        return make_refitter(self.urls(policy), folder, self.folder_of(policy), self._headers())

    def count_tokens(self) -> Callable[[str], int]:
        """Counts tokens as the policy does."""
        return self._tokenizer().count

    def index(self) -> Path:
        """Folder of the search index over the run's pages, built on first use."""
        folder = self._run.root / "pages" / "index"
        if not folder.exists():
            from groundhop.agents.index import build_index
            from groundhop.pipeline.pages import read_pages

            pages = self._run.look("pages").output("pages.jsonl.zst")
            count = build_index(read_pages(pages), folder, passage_words=self._run.config.search.passage_words)
            logger.info("index: %d passages in %s", count, folder)
        return folder

    def toolbox(self, keep: bool = True) -> "Toolbox":
        """The agent's tools over the run's index or the web. One for each event loop.

        `keep` puts the replay store between them; questions of an encrypted benchmark must not reach a disk in plain.
        """
        from groundhop.agents.tools import make_toolbox

        table = self._run.config.search
        index = self.index() if table.provider == "local" else None
        codec = self._tokenizer()
        replay = self._run.root / "replay.sqlite" if keep else None
        return make_toolbox(table, index, replay, codec.count, codec.control_tokens)

    def _headers(self) -> dict[str, str]:
        return {} if self._servers is None else self._servers.headers

    def _tokenizer(self) -> "TemplateCodec":
        if self._codec is None:
            from groundhop.agents.template import TemplateCodec

            self._codec = TemplateCodec(self.base_folder())
        return self._codec
