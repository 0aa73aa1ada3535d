"""What a live launch exports."""

from __future__ import annotations

import json
import re
import shutil
import signal
import stat
import urllib.request
from pathlib import Path

import pytest
from support import runs
from support.prometheus import eventually
from support.trainer_and_loop import TRAINER

from grpo_run.runtime.history.reader import RunReader
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.registry import target_file, targets_folder, token_file

BEHIND = """
import os, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
pair = dist.new_group([0, 1])
dist.all_reduce(torch.ones(1))
for _ in range(3):
    dist.all_reduce(torch.ones(1), group=pair)
if dist.get_rank() == 1:
    while not os.path.exists("end"):
        time.sleep(0.05)
issued = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(5)]
while not os.path.exists("end"):
    time.sleep(0.05)
for work in issued:
    work.wait()
"""


def announced(directory: Path) -> Path:
    """The file that tells Prometheus about a run."""
    folder = targets_folder()
    assert folder is not None
    return target_file(directory, folder)


def assert_has_its_page(server: str, run: runs.Run) -> None:
    """The page of the run is beside its metrics for who has the token, which is in no log; the runbook for
    all.
    """
    file = token_file()
    assert file is not None
    token = file.read_text().strip()
    assert token not in run.printed()
    with urllib.request.urlopen(f"{server}/{token}/events", timeout=20) as answer:
        for line in answer:
            if line.startswith(b"data: ") and b'"ranks"' in line:
                break
        shown = json.loads(line.removeprefix(b"data: "))
    assert (shown["state"], len(shown["ranks"]), shown["live"]) == ("running", 2, True)
    with urllib.request.urlopen(f"{server}/runbook", timeout=20) as answer:
        assert b"GrpoRunHang" in answer.read()


def test_a_live_run_exports_its_ranks(tmp_path: Path) -> None:
    """/metrics of a live launch without caps has state, step, reward, the rewards of each function, and each
    rank's phase, progress, votes, tokens and ends of completions.
    """
    run = runs.Run(
        tmp_path,
        [
            "--nproc-per-node", "2", str(runs.SCRIPTS / TRAINER), "--output-dir", "out", "--max-steps", "60",
            "--save-steps", "20", "--step-seconds", "0.1",
        ],
        metrics="127.0.0.1:0",
    ).start()  # fmt: skip
    try:
        run.until_event("step_logged")
        run.until_step(12)
        address = re.search(r"http://[\d.]+:\d+/metrics", run.printed())
        assert address is not None, run.tail()
        assert_has_its_page(address[0].removesuffix("/metrics"), run)
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
            completions = total("grpo_rank_completions_total", f'rank="{rank}"')
            tokens = total("grpo_rank_tokens_generated_total", f'rank="{rank}"')
            prompts = total("grpo_rank_prompt_tokens_total", f'rank="{rank}"')
            assert 0 < completions <= tokens
            assert completions == total("grpo_rank_completions_ended_total", f'rank="{rank}"')
            assert 0 < total("grpo_rank_rewards_scored_total", f'rank="{rank}"') <= completions
            assert 1 <= total("grpo_rank_prompt_length", f'rank="{rank}"') <= prompts
            assert total("grpo_rank_completion_length_max", f'rank="{rank}"') >= 1
            (log,) = run.directory.glob(f"attempts/000/rank{rank}.jsonl")
            events = [json.loads(line) for line in log.read_text().splitlines()]
            assert {(one["attempt"], one["rank"], one["level"]) for one in events} >= {(0, rank, "info")}
            assert any(one["event"] == "step_logged" and one["loss"] != 0 for one in events) == (rank == 0)
        steps = [json.loads(line).get("step") for line in run.directory.joinpath("supervisor.jsonl").open()]
        assert max(filter(None, steps)) >= 10
        assert "grpo_reward{" in text
        assert total("grpo_reward_function_mean") == pytest.approx(total("grpo_reward"))
        assert total("grpo_reward_function_std") > 0
        assert total("grpo_step_seconds") > 0.05
    finally:
        run.close()


def test_a_rank_that_is_behind_shows_in_its_process_group(tmp_path: Path) -> None:
    """By rank and group, as the Flight Recorders say; a scrape does not wait for them."""
    (tmp_path / "script.py").write_text(BEHIND)
    run = runs.Run(tmp_path, ["--nproc-per-node", "2", "script.py"], metrics="127.0.0.1:0").start()
    try:
        (group,) = json.loads(
            eventually(lambda: announced(run.directory).exists() and announced(run.directory), "target")
            .read_text()
        )  # fmt: skip

        def collectives() -> dict[tuple[str, ...], float]:
            with urllib.request.urlopen(f"http://{group['targets'][0]}/metrics", timeout=10) as answer:
                text = answer.read().decode()
            lines = re.findall(r"^grpo_collective(\w+){(.+)} (.+)", text, re.MULTILINE)
            return {
                (name, *re.findall('(?:group|rank)="(.*?)"', labels)): float(n) for name, labels, n in lines
            }

        wanted = {
            ("s_enqueued", "default", "0"): 6, ("s_completed", "default", "0"): 1,
            ("s_enqueued", "default", "1"): 1, ("s_completed", "default", "1"): 1,
            **{(name, "1", rank): 3 for name in ("s_enqueued", "s_completed") for rank in "01"},
            ("_straggler_gap", "default"): 0, ("_straggler_gap", "1"): 0,
        }  # fmt: skip
        eventually(lambda: collectives() == wanted, "five collectives that rank 1 has not reached")
        (tmp_path / "end").touch()
        run.ended(0)
        assert not announced(run.directory).exists()
    finally:
        run.close()


def test_a_run_is_read_and_announced_whatever_happens_to_its_supervisor(tmp_path: Path) -> None:
    """A live run, a copy of it, and one whose supervisor was killed, until it is launched again."""
    (tmp_path / "script.py").write_text(
        "import os, time\n\nwhile not os.path.exists('end'):\n    time.sleep(0.05)\n"
    )
    run = runs.Run(tmp_path, ["--nproc-per-node", "1", "script.py"], metrics="127.0.0.1:0").start()
    try:
        run.until_event("rank_started")
        reader = RunReader(RunDirectory(path=run.directory))
        live = reader.read()
        assert (live.state, live.supervisor_pid) == (live.history.state, run.process.pid)
        file = announced(run.directory)
        assert stat.S_IMODE(file.stat().st_mode) == 0o644
        shutil.copytree(
            run.directory, tmp_path / "copy",
            ignore=lambda folder, names: [name for name in names if (Path(folder) / name).is_socket()],
        )  # fmt: skip
        assert RunReader(RunDirectory(path=tmp_path / "copy")).read().state == "unknown"
        run.send_signal(signal.SIGKILL)
        run.wait()
        assert reader.read().state == "unknown"
        assert file.exists()
        (tmp_path / "end").touch()
        again = runs.Run(tmp_path, ["--nproc-per-node", "1", "script.py"]).start()
        try:
            again.ended(0)
        finally:
            again.close()
        assert reader.read().state == "finished"
        assert not file.exists()
    finally:
        run.close()
