"""The texts of features' options: how they are read, and the line with which they are refused; see the text
file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.transcripts import Story, stories

from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.features.caps.settings import CapsSettings, parse_caps
from grpo_run.runtime.features.injections._injection import check, parse_all
from grpo_run.runtime.features.learning_guards.settings import LearningGuard, parse_guards
from grpo_run.runtime.features.memory_plan.settings import parse_memory_plan
from grpo_run.runtime.launch.option import given_values


def answer(read: Callable[[], object]) -> str:
    """What is read, or the one line of the refusal."""
    try:
        return str(read())
    except UsageError as error:
        return str(error)


class OptionShell:
    """An option is a command, with each of its texts as a word."""

    def inject(self, *texts: str, ranks: str = "2") -> str:
        """`--inject`, for a run of so many ranks."""

        def read() -> str:
            found = parse_all(texts)
            check(found, int(ranks))
            return "\n".join(f"{one} in {one.phase.name} for {one.seconds:g} s" for one in found) or "none"

        return answer(read)

    def guard(self, *words: str, **settings: str) -> str:
        """`--guard`: the responses that differ from those by default, and the limits."""

        def read() -> str:
            rules, usual = parse_guards([*words, *pairs(settings)]), parse_guards([])
            said = [f"{one} {rules.response(one)}" for one in LearningGuard]
            by_default = [f"{one} {usual.response(one)}" for one in LearningGuard]
            changed = [text for text in said if text not in by_default] if words or settings else said
            limits = [f"{one} {limit:g}" for one, limit in rules.limits.items()]
            return "; ".join([", ".join(changed), *([f"limits {', '.join(limits)}"] if limits else [])])

        return answer(read)

    def generation(self, *words: str, **settings: str) -> str:
        """`--generation`."""
        return answer(lambda: parse_caps([*words, *pairs(settings)]))

    def mask_capped(self, *text: str) -> str:
        """`--mask-capped`."""
        given = {"--mask-capped": text[0]} if text else {}
        return answer(lambda: CapsSettings(**given_values(CapsSettings, given)).masked_ends)

    def memory_plan(self, *text: str) -> str:
        """`--memory-plan`."""
        return answer(lambda: parse_memory_plan(" ".join(text)))


def pairs(settings: dict[str, Any]) -> list[str]:
    """Return the words that a story takes for named arguments."""
    return [f"{name}={value}" for name, value in settings.items()]


@stories(__file__, "option_texts.txt")
def test_option_texts(story: Story, word: str) -> None:
    """Every story of the file."""
    story.check(OptionShell(), word)
