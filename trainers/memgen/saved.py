"""Save a trained MemGen with all that answers need, and load it back.

    memgen = load("runs-output/memgen-gsm8k/final")
    memgen.answer(["A baker has 12 ..."])

Recipes save on one rank, and their evaluation loads what they have saved, so that what is measured is what is
there afterwards. The folder has the adapters, the tokenizer, sizes and settings; the reasoner's weights only
if it has no name to load them by. Trains nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import maybe_apply_chat_template

from grpo_run.runtime.errors import ConfigError
from grpo_run.trainers.memgen.generation import GenerationSettings, Mode, generate
from grpo_run.trainers.memgen.model import MemGen
from grpo_run.trainers.memory_settings import MemorySettings

FILE = "memgen.json"
REASONER, WEAVER, TRIGGER = "reasoner", "weaver", "trigger"


@dataclass(frozen=True, kw_only=True)
class SavedMemGen:
    """What `load` returns."""

    memgen: MemGen
    tokenizer: Any
    generation: GenerationSettings

    def answer(self, prompts: Sequence[Any], mode: Mode = "argmax") -> list[str]:
        """Return the completion of each prompt, greedily.

        Args:
            prompts: texts, or conversations.
            mode: whether the trained trigger decides (`argmax`), memory is woven wherever the budget allows
                it (`always`), or nowhere (`none`).
        """
        ids = [prompt_tokens(self.tokenizer, prompt) for prompt in prompts]
        found = generate(self.memgen, ids, self.generation, mode)
        texts: list[str] = self.tokenizer.batch_decode(found.tokens, skip_special_tokens=True)
        return texts


def prompt_tokens(tokenizer: Any, prompt: Any) -> list[int]:
    """Return the token ids of a prompt: text, or a conversation in the tokenizer's chat template."""
    text = maybe_apply_chat_template({"prompt": prompt}, tokenizer)["prompt"]
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def save(memgen: MemGen, tokenizer: Any, generation: GenerationSettings, folder: Path) -> None:
    """Write a MemGen to a folder, which is created. Not collective."""
    folder.mkdir(parents=True, exist_ok=True)
    name = memgen.reasoner.name_or_path
    if name:
        name = str(Path(name).resolve()) if Path(name).exists() else name
    else:
        memgen.reasoner.save_pretrained(folder / REASONER)
    memgen.weaver.save_pretrained(folder / WEAVER)
    memgen.trigger.save_pretrained(folder / TRIGGER)
    tokenizer.save_pretrained(folder)
    content = {
        "reasoner": name, "delimiters": memgen.delimiters, "memory": asdict(memgen.settings),
        "generation": asdict(generation),
    }  # fmt: skip
    (folder / FILE).write_text(json.dumps(content, indent=1) + "\n")


def load(path: str | Path, device: torch.device | str = "cpu") -> SavedMemGen:
    """Load a MemGen that was saved.

    Args:
        path: of the folder.
        device: to which the models are moved.

    Raises:
        ConfigError: the folder has none.
    """
    folder = Path(path)
    try:
        content = json.loads((folder / FILE).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(folder)!r} has no saved MemGen: {error}") from None
    reasoner = AutoModelForCausalLM.from_pretrained(content["reasoner"] or folder / REASONER)
    with torch.random.fork_rng():  # the weights that are replaced are random
        memgen = MemGen(reasoner, MemorySettings(**content["memory"]), content["delimiters"])
    memgen.weaver.load_adapter(str(folder / WEAVER), "default")
    memgen.trigger.load_adapter(str(folder / TRIGGER), "default")
    return SavedMemGen(
        memgen=memgen.to(torch.device(device)),
        tokenizer=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        generation=GenerationSettings(**content["generation"]),
    )
