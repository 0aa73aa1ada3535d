"""What proves that a rollout server is dead or stuck, and what does not; see the text file."""

from __future__ import annotations

from typing import Any

from support.transcripts import Story, stories

from grpo_run.runtime.features.rollout_server._judge import Processes, Reading, judge

NOW = 1000.0
ENGINE = "VLLM::EngineCore (7)"


class JudgeShell:
    """The last look at a server that ranks have needed for ten minutes."""

    def judge(self, needed: str = "600", syncing: str = "", of_others: str = "", **seen: str) -> str:
        """What is found. Times are seconds ago; `gone` and `stopped` are the engine's."""
        reading: dict[str, Any] = {}
        processes: dict[str, Any] = {}
        for name, text in seen.items():
            if name == "exit_code":
                processes[name] = int(text)
            elif name in ("gone", "stopped"):
                processes[name] = (ENGINE, NOW - float(text))
            elif name == "counts_tokens":
                reading[name] = text == "yes"
            else:
                reading[name] = float(text) if name.endswith("_seconds") else NOW - float(text)
        found = judge(
            Reading(**reading), None if of_others else Processes(**processes), syncing=bool(syncing), now=NOW,
            needed_since=None if needed == "no" else NOW - float(needed),
        )  # fmt: skip
        if found is None:
            return "none"
        return f"{found.cause} for {NOW - found.since:g} s ({found.confidence}): {found.what}"


@stories(__file__, "judge.txt")
def test_judge(story: Story, word: str) -> None:
    """Every story of the file."""
    story.check(JudgeShell(), word)
