"""Make a tiny random Llama with a tokenizer of its own, in seconds and without network: for smoke runs and tests."""

from pathlib import Path
from typing import Any

from groundhop.training.models import save_tokenizer

SEED = 20240613
VOCABULARY = 640
MAX_LENGTH = 4096

_TEXT = """\
Groundhop turns pages of the web into questions that take two hops to answer, and trains an agent that searches.
You are a search agent. Use the tools search and visit, then finish with a line that begins with Exact Answer.
The town lies on the river; the bridge was built in 1874 by an engineer who was born in another country.
A page links to the next page, and the next page holds the fact: a date, a number or the name of a person.
<tool_call>
{"name": "search", "arguments": {"queries": ["the engineer of the bridge", "the year of the first edition"]}}
</tool_call>
<tool_call>
{"name": "visit", "arguments": {"url": "https://example.org/wiki/bridge", "find": "when was it opened"}}
</tool_call>
<tool_response>
Result 1: The history of the bridge https://example.org/history It was opened in May 1874 and rebuilt after the flood.
</tool_response>
Question: In which year did the museum, described as the oldest of the town, move to the house by the harbour?
Exact Answer: 1874
Exact Answer: Maria Lind
system user assistant tool
"""


def build_tiny(work: Path) -> dict[str, Any]:
    """Write the model, its tokenizer and generation settings into `work`; the same bytes each time."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = _tokenizer()
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM's CPU attention takes
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = LlamaForCausalLM(config).bfloat16()
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model.save_pretrained(work)
    save_tokenizer(tokenizer, work, MAX_LENGTH)
    return {"source": "made on the spot", "seed": SEED, "licence": "Apache-2.0"}


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        show_progress=False,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        # All 256 bytes are tokens, so that every text can be encoded and comes back.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(_TEXT.splitlines(keepends=True), trainer)
    return tokenizer
