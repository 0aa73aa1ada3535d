"""The panels of the dashboard "Ranks and collectives": what each rank does, and who waits for whom.

Called by `_grafana.py`. How a panel looks is in `_panels.py`.
"""

from __future__ import annotations

from grpo_run.dashboards.metrics.metric import PHASES
from grpo_run.dashboards.provisioning._panels import (
    PHASE_COLORS,
    BuiltPanel,
    bands,
    lines,
    one_hot_number,
    row,
    value_mapping,
)

UNOBSERVABLE = -1
NO_OPEN_PHASE = 0


def ranks() -> list[BuiltPanel]:
    """Return the panels, from top to bottom."""
    phase = one_hot_number("grpo_rank_phase", "phase", PHASES, "rank")
    unobservable = "max by (rank) (grpo_rank_observable{RUN} == 0) - 1"
    phases = value_mapping(PHASE_COLORS, PHASES) | {
        UNOBSERVABLE: ("unobservable", "red"),
        NO_OPEN_PHASE: ("no phase", "text"),
    }
    return [
        row("Ranks"),
        bands(
            "Phase by rank", {"rank {{rank}}": f"{phase} or {unobservable}"},
            "Innermost open phase of each rank. Check a rank first if its phase differs from that of the"
            " other ranks.",
            height=8, mappings=phases,
        ),
        lines(
            "Time since last progress, by rank", "s",
            {"rank {{rank}}": "max by (rank) (grpo_rank_last_progress_age_seconds{RUN})"},
            "A rising line is a rank without progress; a line that ends is a rank that cannot be observed.",
        ),
        lines(
            "Age of the open phase, by rank", "s",
            {"rank {{rank}}": "max by (rank) (grpo_rank_phase_age_seconds{RUN})"},
            "Time since the innermost open phase of each rank began.",
        ),
        lines(
            "Voted step by rank", "none", {"rank {{rank}}": "max by (rank) (grpo_rank_voted_step{RUN})"},
            "The other ranks wait for the rank with the lowest line.", decimals=0, from_zero=False,
        ),
        lines(
            "Waiting for a rank", "s",
            {
                "rank {{rank}}, {{phase}}": "max by (rank, phase) (grpo_run_awaited_rank_seconds{RUN})",
                "deadline of rank {{rank}}, {{phase}}":
                    "max by (rank, phase) (grpo_run_awaited_rank_deadline_seconds{RUN})",
            },
            "How long the run has waited for a rank, and until when it may. Gaps: no rank was waited for.",
        ),
        lines(
            "Time waiting in votes", "percentunit",
            {
                "rank {{rank}}":
                    "max by (rank) (rate(grpo_rank_vote_wait_seconds_total{RUN}[$__rate_interval]))",
            },
            "Fraction of time each rank waits for the others. The slowest rank waits least.",
        ),
        lines(
            "Ranks that cannot be watched", "none",
            {
                "rank {{rank}}, collectives": "max by (rank) (grpo_rank_watch_blind{RUN})",
                "rank {{rank}}, unobservable": "1 - min by (rank) (grpo_rank_observable{RUN})",
            },
            "1 while a rank's collective records, or the rank itself, cannot be read: a deadlock may not be"
            " provable then.",
            decimals=0, highest=1,
        ),
        row("Collectives"),
        lines(
            "Completed collectives by rank", "none",
            {"rank {{rank}}, {{group}}": "max by (rank, group) (grpo_collectives_completed{RUN})"},
            "Sequence number of the last collective that each rank has completed in each process group. Lines"
            " of one group that part show a rank that is behind.",
            decimals=0, from_zero=False,
        ),
        lines(
            "Collectives in flight by rank", "none",
            {
                "rank {{rank}}, {{group}}": "max by (rank, group) (grpo_collectives_enqueued{RUN})"
                " - max by (rank, group) (grpo_collectives_completed{RUN})"
            },
            "Collectives that a rank has enqueued and not completed.", decimals=0,
        ),
        lines(
            "Straggler gap by group", "none",
            {"{{group}}": "max by (group) (grpo_collective_straggler_gap{RUN})"},
            "Completed collectives of the rank that is ahead minus those of the rank that is behind.",
            decimals=0,
        ),
        lines(
            "Phase durations", "s",
            {
                "{{phase}}": "histogram_quantile(0.95, sum by (phase, le)"
                " (rate(grpo_phase_duration_seconds_bucket{RUN}[$__rate_interval])))"
            },
            "95 % of the phases of all ranks that ended were shorter.", colors=PHASE_COLORS,
        ),
    ]  # fmt: skip
