"""A model large enough for the checkpoint benchmark, created locally and trained for one real step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, set_seed
from trl import SFTConfig, SFTTrainer


def tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a vocabulary of the model's size, so that saving it takes a realistic time."""
    words = ["<pad>", "<eos>", "<unk>"]
    words += [f"w{number}" for number in range(vocabulary - len(words))]
    model = WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    inner = Tokenizer(model)
    inner.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def trained(layers: int, hidden: int, output_dir: Path) -> Any:
    """Return an SFTTrainer after one step of AdamW in float32 on the CPU.

    Args:
        layers: number of layers; with a hidden size of 1024 each has about 12.8 million parameters, in
            addition to 33 million in the embeddings.
        hidden: hidden size; the vocabulary and the feed-forward layers grow with it.
        output_dir: folder for checkpoints.
    """
    set_seed(7)
    vocabulary = hidden * 125 // 4
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    trainer = SFTTrainer(
        model=Qwen2ForCausalLM(config),
        args=SFTConfig(
            output_dir=str(output_dir),
            max_steps=1,
            per_device_train_batch_size=1,
            save_strategy="no",
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
            disable_tqdm=True,
            max_length=16,
        ),
        train_dataset=Dataset.from_dict({"text": ["w1 w2 w3 w4"] * 4}),
        processing_class=tokenizer(vocabulary),
    )
    trainer.train()
    return trainer
