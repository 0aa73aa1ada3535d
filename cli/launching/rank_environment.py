"""The environment variables of one rank: the settings that the bootstrap reads, and what torch reads.

Called by the supervisor through `supervise.py`, for each rank of each attempt. Chooses nothing: the values are those
of the run's configuration, its history and the attempt.
"""

from __future__ import annotations

import os
import time

from grpo_run.runtime.continuity.fresh_seeds import orders_of
from grpo_run.runtime.launch.config import Output
from grpo_run.runtime.launch.rank_settings import RankSettings
from grpo_run.runtime.supervision.memory.allocator import expandable_segments
from grpo_run.runtime.supervision.memory.run_memory import config_for_ranks
from grpo_run.runtime.supervision.supervisor import Supervisor
from grpo_run.watchdog.observation import Phase

FLIGHT_RECORDER = "TORCH_FR_BUFFER_SIZE"
RECORDED_COLLECTIVES = 256
"""Entries of torch's flight recorder per rank. They cover several steps; all of them (120 KB) are read in a
hang."""


def rank_environment(supervisor: Supervisor, rank: int, world_size: int) -> dict[str, str]:
    """Return the environment variables that the bootstrap of one rank reads."""
    config, files = supervisor.config, supervisor.attempt.files
    plan = supervisor.history.memory.plan
    settings = RankSettings(
        config=config_for_ranks(config, plan),
        attempt=supervisor.attempt.number,
        run_started_at=supervisor.run_started_at,
        log=str(files.log(rank)),
        errors=str(files.errors(rank)) if config.output is Output.apart else None,
        stacks=str(files.stacks(rank)),
        socket=str(files.socket(rank)),
        error=str(files.error(rank)),
        preloaded=config.preload,
        parent_pid=os.getpid(),
        title=f"grpo-run rank {rank}/{world_size}: {config.target} {' '.join(config.arguments)}".rstrip(),
        failure_seconds=supervisor.history.mean_time_between_failures(),
        known_calls=supervisor.history.calls.to_pass(),
        attempt_started_at=time.time(),
        expected_snapshot=supervisor.expected_snapshot,
        fresh_seeds=orders_of(supervisor.history.recoveries),
        injections_fired=tuple(supervisor.history.injections_fired),
        quarantine=supervisor.quarantine.prompts,
        suspected_rollout=supervisor.quarantine.suspected,
        prompts=str(files.prompts(rank)),
        moved_rewards=tuple(supervisor.history.rewards.moved),
        reward_durations=supervisor.history.phases.of_phase(Phase.reward),
        memory_plan=plan,
    )
    environment = settings.to_environment()
    if plan.expandable_segments:
        environment |= expandable_segments({**os.environ, **config.environment})
    if FLIGHT_RECORDER not in config.environment:
        environment[FLIGHT_RECORDER] = str(RECORDED_COLLECTIVES)
    return environment
