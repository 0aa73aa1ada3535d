"""Measure what caps on generation cost, and how much real text the repetition cap takes for loops.

The cost is measured in pairs: the same batch is generated with and without caps in turn, in one process on
    one thread, in
CPU time. The text is that
of GSM8K's solutions (GRPO_RUN_GSM8K names the folder) and of the documentation strings in Python's library.
"""

from __future__ import annotations

import ast
import json
import os
import random
import statistics
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import Qwen2Config, Qwen2ForCausalLM, StoppingCriteriaList

sys.path.insert(0, str(Path(__file__).resolve().parent))

from parts import machine

from grpo_run.runtime.features.caps._criteria import CapCriteria
from grpo_run.runtime.features.caps._rollout import CappedRollout
from grpo_run.trainers.caps import Deadline, Repetition

GSM8K = Path(os.environ.get("GRPO_RUN_GSM8K") or machine.REPOSITORY.parent / "shared/data/gsm8k")
SAMPLES = 10_000
WINDOWS = (64, 128)
BATCH, NEW_TOKENS, PROMPT = 64, 512, 32
VOCABULARY = 8_000
SHORTEST_TEXT = 600
"""Characters. Shorter documentation strings could not hold a loop."""


def solutions() -> list[str]:
    """Return all solutions of GSM8K; none if it is not there."""
    found = []
    for name in ("train.jsonl", "test.jsonl"):
        if (GSM8K / name).is_file():
            with open(GSM8K / name, encoding="utf-8") as file:
                found += [json.loads(line)["answer"] for line in file]
    return found


def documentation(count: int) -> list[str]:
    """Return documentation strings of installed Python packages, in an order that is always the same."""
    found: set[str] = set()
    folders = (Path(sysconfig.get_paths()["stdlib"]), Path(sysconfig.get_paths()["purelib"]))
    files = sorted(path for folder in folders for path in folder.rglob("*.py"))
    random.Random(0).shuffle(files)
    for path in files:
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, SyntaxError, RecursionError):
            continue  # a file of tests that is wrong on purpose
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)):
                text = ast.get_docstring(node) or ""
                if len(text) >= SHORTEST_TEXT:
                    found.add(text)
        if len(found) >= count:
            break
    return sorted(found)[:count]


def false_stops(texts: list[str], window: int, tokenizer: Tokenizer) -> int:
    """Return how many texts would be ended as loops."""
    rows = sorted((tokenizer.encode(text).ids for text in texts), key=len)
    stopped = 0
    for first in range(0, len(rows), 128):
        some = rows[first : first + 128]
        longest = max(map(len, some))
        # what follows a text does not repeat itself
        filled = [row + list(range(10**6, 10**6 + longest - len(row))) for row in some]
        stopped += int(Repetition(0, window=window)(torch.tensor(filled)).sum())
    return stopped


def trained(texts: list[str]) -> Tokenizer:
    """Return a byte-level BPE tokenizer of these texts."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(
        texts, BpeTrainer(vocab_size=30_000, show_progress=False, initial_alphabet=ByteLevel.alphabet())
    )
    return tokenizer


def pairs(number: int, window: int) -> list[tuple[float, float]]:
    """Return the CPU seconds of a generation on one thread without and with caps, in turn which comes
    first.
    """
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=1024, num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, bos_token_id=None, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    prompts = torch.randint(1, VOCABULARY, (BATCH, PROMPT))

    def once(capped: bool) -> float:
        rollout = CappedRollout(end_tokens={0}, max_length=NEW_TOKENS, deadline=Deadline(3600.0))
        criteria: Any = None
        if capped:
            criteria = CapCriteria(
                PROMPT, {0}, repetition=Repetition(PROMPT, window=window), out_of_time=rollout.out_of_time
            )
        torch.manual_seed(1)
        began = time.process_time()
        found = model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            max_new_tokens=NEW_TOKENS,
            stopping_criteria=StoppingCriteriaList([criteria] if capped else []),
        )
        seconds = time.process_time() - began
        assert found.shape[1] == PROMPT + NEW_TOKENS, "a random text was taken for a loop"
        return seconds

    once(True)
    found = []
    for index in range(number):
        first = once(bool(index % 2))
        second = once(not index % 2)
        found.append((second, first) if index % 2 else (first, second))
    return found


def main() -> int:
    """Measure, print the tables, and write the samples."""
    parser = machine.argument_parser(__doc__)
    parser.add_argument("--pairs", type=machine.count, default=6, help="generations with and without caps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    facts = machine.facts()
    console = Console()

    gsm8k = solutions()
    texts = documentation(max(0, SAMPLES - len(gsm8k)))
    tokenizer = trained([*gsm8k, *texts])
    table = Table("window", "text", "samples", "taken for loops")
    stops: dict[str, Any] = {}
    for window in WINDOWS:
        for name, some in (("GSM8K solutions", gsm8k), ("documentation", texts)):
            stopped = false_stops(some, window, tokenizer)
            stops[f"{name}, {window}"] = {"samples": len(some), "stopped": stopped}
            table.add_row(str(window), name, str(len(some)), str(stopped))
    console.print(table)

    measured = pairs(options.pairs, WINDOWS[-1])
    costs = [with_caps / without - 1 for without, with_caps in measured]
    table = Table("tokens", "without caps", "with caps", "cost, median of pairs")
    table.add_row(
        f"{BATCH} x {NEW_TOKENS}",
        f"{statistics.median(one[0] for one in measured):.2f} s",
        f"{statistics.median(one[1] for one in measured):.2f} s",
        f"{statistics.median(costs):+.1%}",
    )
    console.print(table)
    result = {
        "benchmark": "caps",
        "machine": facts,
        "settings": {"batch": BATCH, "new_tokens": NEW_TOKENS, "windows": WINDOWS},
        "false_stops": stops,
        "pairs": measured,
    }
    machine.finish(console, result, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
