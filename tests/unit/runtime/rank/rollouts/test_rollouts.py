"""One rank's forecasts: what is measured counts, decisions are published, and the next attempt begins with
them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.journal import read_records

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.launch.injections import parse_all
from grpo_run.runtime.launch.rank_settings import RankSettings
from grpo_run.runtime.memory.files import FORECAST_FOLDER, MOST_ROLLOUTS, MOST_SIZES, read_forecast
from grpo_run.runtime.memory.plan import MemoryPlan
from grpo_run.runtime.rank.memory.device import DeviceMemory
from grpo_run.runtime.rank.rollouts.forecast import (
    SIMULATED_TOKEN_BYTES,
    ForecastMemory,
    Forecasts,
    GeneratedRollout,
    memory_of,
    prepare,
)
from grpo_run.watchdog.memory.phase_memory import MemoryForecast
from grpo_run.watchdog.observation import Phase

ROWS = 8
BASE, GRADIENTS = 1000, 300


class Gpu(ForecastMemory):
    """Memory of a GPU whose figures the test sets."""

    limit = 0

    def __init__(self) -> None:
        super().__init__(DeviceMemory())

    def limit_bytes(self) -> int:
        return self.limit

    def allocated_bytes(self) -> int:
        return BASE


def rollout(number: int, length: int, **changes: Any) -> GeneratedRollout:
    """The rollout of one optimizer step with one micro-batch."""
    fields: dict[str, Any] = {
        "number": number, "rows": ROWS, "length": length, "accumulates": False,
        "steps": (number + 1, number + 1),
    }  # fmt: skip
    return GeneratedRollout(**{**fields, **changes})


def forecasts(session: Any, gpu: Gpu, *, reasons: tuple[str, ...] = ()) -> Forecasts:
    """The forecasts of a call."""
    return Forecasts(session, gpu, 1, reasons=reasons, gradient_bytes=GRADIENTS)


def train(made: Forecasts, of: GeneratedRollout, *, byte_per_token: int = 10) -> int:
    """Train one rollout: decide, pass, and measure; return the number of pieces."""
    made.begin(of)
    assert made.pieces is not None
    rows = -(-ROWS // made.pieces)
    kept = GRADIENTS if made.pieces > 1 else 0
    made.passed("pass", (rows, of.length), beside_gradients=made.pieces > 1)
    made.phase_ended(Phase.forward_backward, BASE, BASE + kept + byte_per_token * rows * of.length)
    return made.pieces


def events(session: Any, name: str = "micro_batches_split") -> list[dict[str, Any]]:
    """The journal's events of one name."""
    path = Path(session.config.run_directory) / "journal.jsonl"
    return [record for record in read_records(path) if record["event"] == name]


def test_micro_batches_are_split_when_they_would_not_fit_and_whole_again_when_they_would(
    session: Any,
) -> None:
    gpu, made = Gpu(), None
    gpu.limit = BASE + 10 * ROWS * 100
    made = forecasts(session, gpu)
    lengths = [50, 60, 70, 80, 90, 99, 101, 150, 60]
    assert [train(made, rollout(*one)) for one in enumerate(lengths)] == [1, 1, 1, 1, 1, 2, 2, 2, 1]
    first, last = events(session)
    assert (first["step"], first["pieces"], first["decided_by"]) == (6, 2, 0)
    assert first["predicted_bytes"] == pytest.approx(BASE + 10 * ROWS * 99, rel=1e-3)
    assert first["limit_bytes"] == gpu.limit
    assert first["observed_before_bytes"] == BASE + 10 * ROWS * 90
    assert (last["step"], last["pieces"]) == (9, 1)
    (line,) = session.notified
    assert line.startswith("micro-batches are split by 2 for step 6, with the same gradient: ")


def test_what_was_predicted_and_observed_is_published(session: Any, board: Board) -> None:
    gpu = Gpu()
    gpu.limit = BASE + 10 * ROWS * 100
    made = forecasts(session, gpu)
    for one in enumerate([50, 70, 120]):
        train(made, rollout(*one))
    memory = board.rank_memory(0)
    assert memory is not None
    assert memory.forecast is not None
    predicted = memory.forecast.predicted_bytes
    assert predicted == pytest.approx(BASE + GRADIENTS + 10 * 4 * 120, rel=1e-3)
    assert memory.forecast == MemoryForecast(
        predicted_bytes=predicted, observed_bytes=BASE + GRADIENTS + 10 * 4 * 120, limit_bytes=gpu.limit,
        pieces=2, rollouts=3, split_rollouts=1,
    )  # fmt: skip
    assert memory.as_json()["forecast"]["pieces"] == 2


def test_the_line_says_if_single_rows_may_not_fit_either(session: Any) -> None:
    gpu = Gpu()
    gpu.limit = BASE + 1000
    made = forecasts(session, gpu)
    train(made, rollout(0, 50))
    assert train(made, rollout(1, 90)) == ROWS
    (line,) = session.notified
    assert line.endswith(" predicted on rank 0, 2.0 KiB available; 2.1 KiB still predicted")


def test_what_does_not_belong_to_a_pass_is_not_measured(session: Any) -> None:
    """Phases without passes, and other phases."""
    made = forecasts(session, Gpu())
    made.phase_ended(Phase.forward_backward, BASE, 10**9)
    made.passed("pass", (ROWS, 100))
    made.phase_ended(Phase.optimizer, BASE, 10**9)
    made.phase_ended(Phase.forward_backward, BASE, BASE + 5000)
    made.phase_ended(Phase.forward_backward, BASE, 10**9)
    made.begin(rollout(0, 100))
    kept = read_forecast(session.config.run_directory, 0)
    assert kept is not None
    assert kept.passes == ((ROWS, 100, 5000),)


def test_scoring_that_needs_more_than_the_passes_decides(session: Any) -> None:
    gpu = Gpu()
    gpu.limit = BASE + 10 * ROWS * 1000
    made = forecasts(session, gpu)
    for number, length in enumerate((100, 200)):
        train(made, rollout(number, length))
        made.passed("score", (ROWS, length))
        made.phase_ended(Phase.score, BASE, BASE + 40 * ROWS * length)
    made.begin(rollout(2, 400))
    assert made.pieces == 2


def test_the_next_attempt_splits_from_the_first_rollout_on(session: Any) -> None:
    """A run that has grown and is then killed would run out of memory at once."""
    gpu = Gpu()
    gpu.limit = BASE + 10 * ROWS * 100
    made = forecasts(session, gpu)
    for one in enumerate([50, 80, 120]):
        train(made, rollout(*one))
    again = forecasts(session, gpu)
    again.begin(rollout(3, 150))
    assert again.pieces == 2


def test_a_rollout_that_is_generated_again_is_split_as_it_was(session: Any) -> None:
    """What is predicted in the meantime does not change the sums of a step that is repeated."""
    gpu = Gpu()
    gpu.limit = BASE + 10 * ROWS * 100
    made = forecasts(session, gpu)
    train(made, rollout(0, 50))
    train(made, rollout(1, 90))
    assert train(made, rollout(2, 120)) == 2
    gpu.limit = BASE + 10 * ROWS * 80
    again = forecasts(session, gpu)
    assert train(again, rollout(1, 90)) == 1
    assert train(again, rollout(2, 120)) == 2
    other = forecasts(session, gpu)
    assert (
        train(other, rollout(1, 91)) == 2
    )  # another rollout: with other seeds, or a script that was changed


def test_passes_under_another_memory_plan_are_forgotten(
    session: Any, make_settings: Callable[..., RankSettings]
) -> None:
    """Gradient checkpointing changes what they need; a smaller micro-batch does not."""
    gpu = Gpu()
    gpu.limit = BASE + 10 * ROWS * 100
    made = forecasts(session, gpu)
    for one in enumerate([50, 80, 120]):
        train(made, rollout(*one))
    session.settings = make_settings(memory_plan=MemoryPlan(gradient_checkpointing=True))
    assert train(forecasts(session, gpu), rollout(3, 150)) == 1


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"train_call": 1}', '{"train_call": 2, "world_size": 1, "plan": ""}']
)
def test_a_file_that_says_nothing_is_as_none(session: Any, text: str) -> None:
    folder = Path(session.config.run_directory) / FORECAST_FOLDER
    folder.mkdir(parents=True)
    (folder / "rank-0.jsonl").write_text(text)
    assert train(forecasts(session, Gpu()), rollout(0, 50)) == 1


def test_what_is_kept_is_bounded(session: Any) -> None:
    made = forecasts(session, Gpu())
    for number in range(3 * MOST_ROLLOUTS):
        train(made, rollout(number, 50 + number))
    kept = read_forecast(session.config.run_directory, 0)
    assert kept is not None
    assert [one.rollout for one in kept.rollouts] == list(range(2 * MOST_ROLLOUTS, 3 * MOST_ROLLOUTS))
    path = Path(session.config.run_directory) / FORECAST_FOLDER / "rank-0.jsonl"
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(kept.passes) <= MOST_SIZES


def test_a_file_that_was_cut_or_has_grown_is_read_as_far_as_it_counts(
    session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may die while it writes; a long run does not fill the disk."""
    monkeypatch.setattr("grpo_run.runtime.memory.files.MAX_FORECAST_BYTES", 4000)
    made = forecasts(session, Gpu())
    path = Path(session.config.run_directory) / FORECAST_FOLDER / "rank-0.jsonl"
    sizes = []
    for number in range(300):
        train(made, rollout(number, 50 + number))
        sizes.append(path.stat().st_size)
    assert max(sizes) < 10_000
    whole = read_forecast(session.config.run_directory, 0)
    with path.open("ab") as file:
        file.write(b'{"passes":[[8,')
    assert read_forecast(session.config.run_directory, 0) == whole
    assert whole is not None
    assert whole.rollouts[-1].rollout == 299


def test_a_run_that_may_not_split_is_warned_once(session: Any) -> None:
    gpu = Gpu()
    gpu.limit = BASE + 10 * ROWS * 100
    made = forecasts(session, gpu, reasons=("the model is sharded (fsdp2)",))
    assert [train(made, rollout(*one)) for one in enumerate([50, 80, 120, 150])] == [1, 1, 1, 1]
    (line,) = session.notified
    assert line.startswith("the next steps may run out of GPU memory: ")
    assert line.endswith("micro-batches are not split, because the model is sharded (fsdp2)")
    assert not events(session)


def test_without_a_limit_there_is_no_forecast(
    session: Any, make_settings: Callable[..., RankSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, where it is switched off, and for trainers that do not generate."""
    monkeypatch.setattr(
        "grpo_run.runtime.rank.rollouts.forecast.has_rollouts", lambda trainer: trainer.generates
    )
    monkeypatch.setattr("grpo_run.runtime.rank.rollouts.forecast.refusals", lambda *of: ())
    trainer = SimpleNamespace(generates=True, model=None)
    assert prepare(trainer, session, 1) is None
    limited = parse_all(
        ["oom@rank0:step1:phase=backward:tokens=90", "oom@rank1:step1:phase=backward:tokens=50"]
    )
    session.settings = make_settings(injections=limited)
    session.config = session.settings.config
    assert memory_of(session).limit_bytes() == 90 * SIMULATED_TOKEN_BYTES
    assert prepare(trainer, session, 1) is not None
    assert prepare(SimpleNamespace(generates=False), session, 1) is None
    session.config = make_settings(injections=limited, memory_forecast=False).config
    assert prepare(trainer, session, 1) is None
