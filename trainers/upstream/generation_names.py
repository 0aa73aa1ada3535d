"""Private names of TRL's trainers that the caps on generation use."""

from __future__ import annotations

SINGLE_TURN = "_generate_single_turn"
"""GRPO and RLOO method (prompt_ids, ...): generate one turn. GRPO returns completions and log-probabilities, RLOO only
completions; a completion is a list of tokens."""
PARSE_RESPONSE = "parse_response"
"""Function (tokenizer, ids, **keywords) in the module of GRPO's trainer: the message of a completion, with the tools that it
calls."""
EOS_TOKENS = "eos_token_ids"
"""GRPO and RLOO attribute: the tokens that end a completion."""
