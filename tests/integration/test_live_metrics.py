"""What a live launch exports, and that a scraper learns how it ended."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import time
import urllib.request
from pathlib import Path

import pytest
from support import runs
from support.prometheus import eventually
from support.trainer_and_loop import TRAINER, loop_in_full

from grpo_run.runtime.registry import target_file, targets_folder


def announced(directory: Path) -> Path:
    """The file that tells Prometheus about a run."""
    folder = targets_folder()
    assert folder is not None
    return target_file(directory, folder)


@loop_in_full
def test_a_live_run_exports_its_ranks(script: str, tmp_path: Path) -> None:
    """/metrics of a live launch without caps has state, step, reward, the rewards of each function, and each
    rank's phase, progress, votes, tokens and ends of completions.
    """
    run = runs.Run(
        tmp_path,
        [
            "--nproc-per-node", "2", str(runs.SCRIPTS / script), "--output-dir", "out", "--max-steps", "60",
            "--save-steps", "20", "--step-seconds", "0.1",
        ],
        metrics="127.0.0.1:0",
    ).start()  # fmt: skip
    try:
        run.until_event("step_logged")
        run.until_step(12)
        address = re.search(r"http://[\d.]+:\d+/metrics", run.printed())
        assert address is not None, run.tail()
        with urllib.request.urlopen(address[0], timeout=10) as answer:
            text = answer.read().decode()
        samples = {
            line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if line[0] != "#"
        }

        def total(name: str, *labels: str) -> float:
            return sum(
                v
                for k, v in samples.items()
                if k.partition("{")[0] == name and all(label in k for label in labels)
            )

        assert total("grpo_run_state", 'state="running"') == 1
        assert total("grpo_step") >= 10
        assert total("grpo_rank_observable") == 2
        for rank in (0, 1):
            assert total("grpo_rank_phase", f'rank="{rank}"') == 1
            assert total("grpo_rank_votes_total", f'rank="{rank}"') > 5
            assert 0 <= total("grpo_rank_last_progress_age_seconds", f'rank="{rank}"') < 30
            if script == TRAINER:
                completions = total("grpo_rank_completions_total", f'rank="{rank}"')
                tokens = total("grpo_rank_tokens_generated_total", f'rank="{rank}"')
                prompts = total("grpo_rank_prompt_tokens_total", f'rank="{rank}"')
                assert 0 < completions <= tokens
                assert completions == total("grpo_rank_completions_ended_total", f'rank="{rank}"')
                assert 0 < total("grpo_rank_rewards_scored_total", f'rank="{rank}"') <= completions
                assert 1 <= total("grpo_rank_prompt_length", f'rank="{rank}"') <= prompts
                assert total("grpo_rank_completion_length_max", f'rank="{rank}"') >= 1
            else:
                assert total("grpo_rank_loss", f'rank="{rank}"') != 0
                assert total("grpo_rank_learning_rate", f'rank="{rank}"') > 0
            (log,) = run.directory.glob(f"attempts/000/rank{rank}.jsonl")
            events = [json.loads(line) for line in log.read_text().splitlines()]
            assert {(one["attempt"], one["rank"], one["level"]) for one in events} >= {(0, rank, "info")}
            assert any(one["event"] == "step_logged" and one["loss"] != 0 for one in events) == (rank == 0)
        steps = [json.loads(line)["step"] for line in run.directory.joinpath("supervisor.jsonl").open()]
        assert max(filter(None, steps)) >= 10
        assert "grpo_reward{" in text
        if script == TRAINER:
            assert total("grpo_reward_function_mean") == pytest.approx(total("grpo_reward"))
            assert total("grpo_reward_function_std") > 0
        assert total("grpo_step_seconds") > 0.05
    finally:
        run.close()


@pytest.mark.parametrize(("code", "exit_code", "state"), [(0, 0, "finished"), (3, 93, "failed")])
def test_a_regular_scraper_learns_how_a_run_ended(
    tmp_path: Path, code: int, exit_code: int, state: str
) -> None:
    """The exporter answers one more scrape after the end, so that an alert can tell 93 from 0. Prometheus is
    told its address until then.
    """
    (tmp_path / "script.py").write_text(f"import sys, time\n\ntime.sleep(1.5)\nsys.exit({code})\n")
    run = runs.Run(tmp_path, ["--nproc-per-node", "1", "script.py"], metrics="127.0.0.1:0").start()
    try:
        address = eventually(lambda: re.search(r"http://[\d.]+:\d+/metrics", run.printed()), "address")[0]
        assert eventually(announced(run.directory).exists, "target")
        states: list[str] = []
        while run.process.poll() is None:
            # the command may exit while it answers, once the last state was read
            cut = contextlib.suppress(OSError, http.client.HTTPException)
            with cut, urllib.request.urlopen(address, timeout=10) as answer:
                states += re.findall(
                    r'grpo_run_state{run_id="[^"]+",state="(\w+)"} 1.0', answer.read().decode()
                )
            time.sleep(0.3)
        run.ended(exit_code)
        assert states[-1] == state
        assert not announced(run.directory).exists()
    finally:
        run.close()
