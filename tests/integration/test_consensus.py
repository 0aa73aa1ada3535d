"""Consensus functions on real ranks: they agree, and ranks that disagree are named, also outside `grpo-run
launch`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.references import plain_ranks
from support.runs import SCRIPTS, Runs, free_port

SCRIPT = SCRIPTS / "consensus.py"
SLOWEST_SECONDS = 5.0
"""One second is promised on a machine that has nothing else to do."""


def line_of(text: str, nth: int = 1) -> int:
    """Return the number of the nth line of the script that is `text`, without its indentation."""
    lines = [number for number, line in enumerate(SCRIPT.read_text().splitlines(), 1) if line.strip() == text]
    return lines[nth - 1]


def answers(folder: Path, rank: int) -> dict[str, Any]:
    """Return what a rank has written down."""
    read: dict[str, Any] = json.loads((folder / f"answers{rank}.json").read_text())
    return read


@pytest.mark.parametrize("launcher", ["grpo-run", "plain", pytest.param("two nodes", marks=pytest.mark.full)])
def test_ranks_decide_together_and_disagreements_are_raised_on_every_rank(
    launcher: str, runs: Runs, tmp_path: Path
) -> None:
    """All ranks take as many rounds as the slowest. Other lines, functions and counts raise, and name both
    sites.
    """
    if launcher == "grpo-run":
        runs("--nproc-per-node", "2", str(SCRIPT)).start().ended()
    elif launcher == "two nodes":
        endpoint = f"127.0.0.1:{free_port()}"
        joined = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "pair", "--rdzv-endpoint", endpoint)
        options = (
            "--run-id", "pair", *joined, "--local-addr", "127.0.0.1", "--nproc-per-node", "1", str(SCRIPT),
        )  # fmt: skip
        nodes = [runs(*options, name=f"node{number}").start() for number in (0, 1)]
        for node in nodes:
            node.ended()
    else:
        plain_ranks(tmp_path, [str(SCRIPT)], ranks=2)
    first, second = answers(tmp_path, 0), answers(tmp_path, 1)
    assert first.pop("agreed") == [7, -4, True, False, False, True]
    assert second.pop("agreed") == [7, 0, True, False, False, True]
    assert first.pop("served")
    assert second.pop("served")
    expected = {
        "other_line": [
            f"rank 0 is in consensus.any at consensus.py:{line_of('consensus.any(True)')} in other_line",
            f"rank 1 is in consensus.any at consensus.py:{line_of('consensus.any(True)', 2)} in other_line",
        ],
        "other_function": ["rank 0 is in consensus.all", "rank 1 is in consensus.any", "in other_function"],
        "other_count": [
            (
                f"rank 0 is in consensus.any at consensus.py:{line_of('consensus.any(False)')} in other_count"
                " (call "
            ),
            (
                f"rank 1 is in consensus.all at consensus.py:{line_of('consensus.all(True)')} in other_count"
                " (call "
            ),
        ],
        "other_iteration": ["(iteration 1, call ", "(iteration 3, call ", "in other_iteration"],
    }
    for name, parts in expected.items():
        (message, at), (other_message, other_at) = first[name], second[name]
        assert message == other_message
        assert [part for part in parts if part not in message] == [], message
        assert abs(at - other_at) < SLOWEST_SECONDS


PLACES = {
    "all_gather": ("rank 1 is in all_gather", "dist.all_gather([torch.zeros"),
    "barrier": ("rank 1 is in barrier", "        dist.barrier()"),
    "backward": ("rank 1 is in all_reduce", "parallel(torch.ones"),
    "train": ("rank 1 is in", ""),
    "end": ("rank 1 has exited", ""),
}
"""Where rank 1 goes, what the verdict says of it, and its line of the script."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("places", [("barrier", "end"), pytest.param(tuple(PLACES), marks=pytest.mark.full)])
def test_a_rank_that_leaves_early_is_named_on_every_rank(
    places: tuple[str, ...], runs: Runs, tmp_path: Path
) -> None:
    """Rank 1 leaves a loop for a collective, a barrier, a backward pass, a Trainer or the end of the script.

    Rank 0, in its next call, raises an error that names both lines; so does the incident, and the log of rank
    1.
    """
    run = runs(
        "--nproc-per-node", "2", "--max-restarts", "9", str(SCRIPT), "--leave", ",".join(places)
    ).start()
    code = run.wait(240)
    verdicts = run.verdicts()
    assert len(verdicts) >= len(places), run.tail()
    loop = next(
        number
        for number, line in enumerate(SCRIPT.read_text().splitlines(), 1)
        if "while_any(lambda: done" in line
    )
    waited = {}
    for attempt, place in enumerate(places):
        what, source = PLACES[place]
        sentence = verdicts[attempt]["sentence"]
        assert what in sentence, (place, sentence)
        assert f"in consensus (consensus.py:{loop}, call 4)" in sentence, (place, sentence)
        assert f"The last consensus call of rank 1 was call 3 at consensus.py:{loop}." in sentence, (
            place,
            sentence,
        )
        lines = [number for number, line in enumerate(SCRIPT.read_text().splitlines(), 1) if source in line]
        assert any(f"consensus.py:{number}, #" in sentence for number in lines) or not source, (
            place,
            sentence,
        )
        logs = [
            (run.directory / "attempts" / f"{attempt:03}" / f"rank{rank}.log").read_text() for rank in (0, 1)
        ]
        raised = re.search(r"raised at ([\d.]+): (.*)", logs[0])
        left = re.search(r"left at ([\d.]+)", logs[1])
        assert raised is not None, (place, logs[0])
        assert left is not None, (place, logs[1])
        assert raised[2] == sentence, (place, sentence)
        assert place == "end" or f"Ended by grpo-run: {sentence}" in logs[1], (place, logs[1])
        waited[place] = float(raised[1]) - float(left[1])
    print({place: round(seconds, 2) for place, seconds in waited.items()}, code)
    assert max(seconds for place, seconds in waited.items() if place != "train") < SLOWEST_SECONDS, waited
