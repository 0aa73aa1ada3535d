"""Checks before the first step that every prompt fits into the model's context window.

Called by `rank.py`. A prompt that does not fit ends a run in the middle of the night: vLLM raises, other
backends read beyond the positions that the model knows. Only prompts that may be too long are tokenized, so a
data set costs a look at the lengths of its texts. A data set that is streamed is not read ahead.
"""

from __future__ import annotations

from typing import Any

from grpo_run.runtime.errors import ConfigError

TEMPLATE_BYTES = 1024
"""More than a chat template adds to a prompt of one message; a template with tools may add more."""


def window_of(trainer: Any) -> int | None:
    """Return how many tokens the model takes, prompt and completion together; None if it does not say."""
    if getattr(trainer, "use_vllm", False):
        limit = getattr(trainer.args, "vllm_max_model_length", None)
        if limit:
            return int(limit)
    config = getattr(trainer.model, "config", None)
    if config is None:
        return None
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "max_position_embeddings", None)


def check_prompts(trainer: Any) -> None:
    """Check the training data of a trainer that generates.

    Raises:
        ConfigError: a prompt leaves no room for a token of a completion.
    """
    data, window = getattr(trainer, "train_dataset", None), window_of(trainer)
    columns = getattr(data, "column_names", None) or ()
    if window is None or "prompt" not in columns or not hasattr(data, "__len__"):
        return
    if hasattr(trainer.processing_class, "image_processor"):
        return  # the tokens of an image are known only when it is read
    assert data is not None
    for number, prompt in enumerate(data["prompt"]):
        if _bytes(prompt) + TEMPLATE_BYTES < window:
            continue
        tokens = _tokens(trainer, prompt)
        if tokens >= window:
            raise ConfigError(
                f"prompt {number} of the training data has {tokens} tokens, and the model's window is"
                f" {window} tokens for prompt and completion together: shorten or remove it. No step was"
                " taken"
            )


def _bytes(prompt: Any) -> int:
    """Return the size of the prompt's text, which is at least its number of tokens."""
    if isinstance(prompt, str):
        return len(prompt.encode("utf-8", "surrogatepass"))
    total = 0
    for message in prompt:
        content = message.get("content") or ""
        parts = [content] if isinstance(content, str) else [part.get("text") or "" for part in content]
        total += sum(len(part.encode("utf-8", "surrogatepass")) for part in parts)
    return total


def _tokens(trainer: Any, prompt: Any) -> int:
    """Return how many tokens the trainer's own tokenizer makes of the text of a prompt."""
    if isinstance(prompt, str):
        return len(trainer.processing_class(text=[prompt])["input_ids"][0])
    keywords = getattr(trainer, "chat_template_kwargs", None) or {}
    found = trainer.processing_class.apply_chat_template(
        conversation=[prompt],
        tools=getattr(trainer, "tools", None) or None,
        chat_template=getattr(trainer, "chat_template", None),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **keywords,
    )
    return len(found["input_ids"][0])
