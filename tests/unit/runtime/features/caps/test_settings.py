"""Caps are parsed from the command line, recorded, and compared when the run is continued."""

from __future__ import annotations

import json
from collections.abc import Callable

from grpo_run.runtime.features.caps.settings import CapsSettings, parse_caps
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.launch.option import changed_training
from grpo_run.watchdog.json_values import to_json


def test_the_last_setting_of_a_key_wins() -> None:
    """Repeated options behave so on any command line."""
    assert parse_caps(["max_time=1", "max_time=2"]) == {"max_time": 2.0}


def test_ranks_get_the_numbers_that_were_given_and_a_continued_run_is_compared_by_them(
    make_config: Callable[..., RunConfig],
) -> None:
    """`run.json` names them by option and cap, whichever module declares the option."""
    given = CapsSettings(generation={"max_completion_length": 64, "max_time": 2.0})
    config = make_config(features={CapsSettings.NAME: json.loads(json.dumps(to_json(given)))})
    found = config.of(CapsSettings)
    assert found == given
    assert [type(value) for value in found.generation.values()] == [int, float]
    assert {name: str(value) for name, value in changed_training(found).items()} == {
        "--generation max_completion_length": "64", "--generation max_time": "2.0",
    }  # fmt: skip
