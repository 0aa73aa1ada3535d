"""A GRPO script whose model is a mixture of experts with an auxiliary loss. Writes `weights.sha256`."""

from __future__ import annotations

import tiny
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM, set_seed


def experts(vocabulary_size: int, seed: int) -> Qwen2MoeForCausalLM:
    """Return a model with two layers of four experts, with the same weights on every rank."""
    set_seed(seed)
    configuration = Qwen2MoeConfig(
        vocab_size=vocabulary_size,
        hidden_size=16,
        intermediate_size=32,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    return Qwen2MoeForCausalLM(configuration)


def main() -> None:
    arguments = tiny.rollout_parser(__doc__).parse_args()
    model = experts(len(tiny.tokenizer()), arguments.seed)
    trainer = tiny.rollout_trainer(arguments, model=model)
    tiny.train(trainer, arguments)
    tiny.write_digest(trainer, arguments.output_dir)


if __name__ == "__main__":
    main()
