"""Values that a script writes as expressions are computed, within bounds; nothing of it is executed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from grpo_run.cli.planning.source import JobSource
from grpo_run.cli.planning.sources import read_source

NAME = "per_device_train_batch_size"


def _source(tmp_path: Path, text: str) -> JobSource:
    script = tmp_path / "train.py"
    script.write_text(text)
    return read_source(str(script))


def _value(tmp_path: Path, expression: str, before: str = "") -> Any:
    """Return what is read of a setting; its name if a note says that it is not."""
    call = f"GRPOTrainer(model='m', args=GRPOConfig({NAME}={expression}))\n"
    source = _source(tmp_path, f"{before}\n{call}")
    if source.unread:
        assert source.unread == [NAME]
        assert NAME not in source.settings
        assert any(NAME in note and "not executed" in note for note in source.notes)
        return NAME
    return source.settings[NAME]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("BS * 2", 4),
        ("(BS + 6) // 3 - 1", 1),
        ("2 ** 3 % 5", 3),
        ("7 / 2", 3.5),
        ("-BS + 5", 3),
        ("int(LENGTH / 3)", 33),
        ("max(1, LENGTH // 30)", 3),
        ("1 << 4", 16),
        ("'a' + NAME", "abig"),
        ("f'models/{NAME}-{BS * 2}'", "models/big-4"),
        ("[BS, *PAIR]", [2, 5, 6]),
        ("(BS,) + PAIR", (2, 5, 6)),
        ("SIZES['large']", 8),
        ("PAIR[-1]", 6),
        ("BS if DEBUG else 16", 16),
        ("WIDE * TALL", 12),
        ("LATER", 9),
    ],
)
def test_expressions_of_written_values_are_computed(expression: str, expected: Any, tmp_path: Path) -> None:
    """Constants of the module and what is made of them."""
    before = (
        "BS = 2\nLENGTH: int = 99\nNAME = 'big'\nPAIR = (5, 6)\nSIZES = {'large': BS * 4}\nDEBUG = False\n"
        "WIDE, TALL = 3, 4\nif __name__ == '__main__':\n    LATER = PAIR[0] + 4"
    )
    found = _value(tmp_path, expression, before)
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(
    "before",
    [
        "import argparse\nx = argparse.ArgumentParser().parse_args().x",
        "x = 2\nx = 4",
        "x = 2\nx += 2",
        "for x in (2, 4): pass",
        "from settings import x",
        "x = int(input())",
        "x = 2\ndef change():\n    global x\n    x = 4",
        "x = y\ny = x",
        "x = x + 1",
        "x = [1]\nx.append(2)",
        "x = {'a': 1}\nx['a'] = 2",
        "def int(value): return 7\nx = int(3)",
        "with open('f') as x: pass",
        "try:\n    x = 2\nexcept ImportError as x:\n    pass",
        "x = f'{3:>1000000000}'",
        "x = 1 / 0",
        "x = 'a' * 3",
        "x = undefined",
    ],
)
def test_what_does_not_follow_from_what_is_written_keeps_its_note(before: str, tmp_path: Path) -> None:
    """A value that may be another one would be wrong without a word."""
    assert _value(tmp_path, "x", before) == NAME


def test_a_name_means_what_it_means_in_its_function(tmp_path: Path) -> None:
    """A local constant hides that of the module; one of another function, and an argument, are others."""
    text = (
        "x = 1\ndef other():\n    x = 3\n    y = 5\n"
        "def main({}):\n    {}\n    GRPOTrainer(model='m', args=GRPOConfig(" + NAME + "={}))\n"
    )

    def read(argument: str, statement: str, expression: str) -> Any:
        source = _source(tmp_path, text.format(argument, statement, expression))
        return source.settings.get(NAME, source.unread)

    assert read("", "x = 2", "x * 4") == 8
    assert read("", "z = x * 2", "z + x") == 3
    assert read("", "pass", "x") == 1
    assert read("x", "pass", "x") == [NAME]
    assert read("", "pass", "y") == [NAME]
    assert read("", "if z: x = 2\n    else: x = 4", "x") == [NAME]


@pytest.mark.parametrize(
    "expression",
    [
        "10 ** 10 ** 10",
        "9 ** 99999999",
        "2.0 ** 99999999",
        "1 << 10 ** 12",
        "round(1, -10 ** 9)",
        "(-8) ** 0.5",
        "1e308 * 10",
        "1" + " + 1" * 400,
        "-" * 80 + "1",
        "int('9' + '0' * 10 ** 9)",
        "t30",
        "s30",
        "n90",
    ],
)
def test_no_expression_takes_long_or_much_memory(expression: str, tmp_path: Path) -> None:
    """Powers, shifts, chains, and values that double with each line stay unknown."""
    before = "t0, s0, n0 = ['a'], 'a', 1\n"
    before += "".join(f"t{i + 1} = [t{i}, t{i}]\ns{i + 1} = s{i} + s{i}\n" for i in range(30))
    before += "".join(f"n{i + 1} = n{i}\n" for i in range(90))
    begun = time.process_time()
    assert _value(tmp_path, expression, before) == NAME
    assert time.process_time() - begun < 5


def test_settings_of_a_dictionary_that_is_written_out_are_read(tmp_path: Path) -> None:
    """What a dictionary adds that cannot be read is said."""
    call = "GRPOTrainer(model='m', args=GRPOConfig(**COMMON, beta=0.1))"
    known = _source(tmp_path, f"BS = 2\nCOMMON = dict({NAME}=BS * 3)\n{call}")
    assert (known.settings[NAME], known.settings["beta"], known.notes) == (6, 0.1, [])
    partly = _source(tmp_path, "COMMON = {'%s': 2, **more}\n%s" % (NAME, call))  # noqa: UP031
    assert partly.settings[NAME] == 2
    assert any("not read" in note for note in partly.notes)
    changed = _source(tmp_path, f"COMMON = dict({NAME}=2)\nCOMMON.update(more)\n{call}")
    assert NAME not in changed.settings


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (f"args.{NAME} = BS * 4", 8),
        (f"other.{NAME} = 8", 2),
        (f"if BS:\n    args.{NAME} = 8", None),
        (f"args.{NAME} *= 4", None),
        (f"args.{NAME} = 8\nargs.{NAME} = 4", None),
        (f"args.{NAME} = unknown", None),
    ],
)
def test_what_a_script_sets_after_the_configuration_is_read_or_said(
    after: str, expected: int | None, tmp_path: Path
) -> None:
    """Under a condition, or more than once, it is not followed."""
    text = f"BS = 2\nargs = GRPOConfig({NAME}=BS)\n{after}\nGRPOTrainer(model='m', args=args)\n"
    source = _source(tmp_path, text)
    assert source.settings[NAME] == (2 if expected is None else expected)
    assert any(
        f"Set again after the configuration is built, which is not followed: {NAME}" in note
        for note in source.notes
    ) == (expected is None)
