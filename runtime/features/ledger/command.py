"""`grpo-run ledger [RUN]`: print what became of the prompts of a run, or export a line for each."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_run.runtime.errors import RunDirectoryError, UsageError
from grpo_run.runtime.features.ledger._join import PromptLine
from grpo_run.runtime.features.ledger.report import read_ledger, sentences, summary
from grpo_run.runtime.files import replace_file
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.run_directory import RunDirectory

NAME = "ledger"
HELP = "show what became of every prompt of a run, or export it"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--json", action="store_true", help="print the sums as one JSON object")
    parser.add_argument(
        "--output", metavar="FILE", type=Path,
        help="write one line for each prompt; .jsonl, or .parquet, which needs the package datasets",
    )  # fmt: skip


def as_json(line: PromptLine) -> dict[str, Any]:
    """Return a line as JSON values."""
    masked = [{"reason": reason, "completions": number} for reason, number in line.masked.items()]
    return {**vars(line), "state": line.state.value, "masked": masked}


def run(directory: RunDirectory, history: History, options: argparse.Namespace) -> int:
    """Print the sums, or write the file and print its path; returns 0.

    Raises:
        RunDirectoryError: the run has no ledger, or a file cannot be read or written.
        UsageError: the file's name ends otherwise.
    """
    output: Path | None = options.output
    if output is not None and output.suffix not in (".jsonl", ".parquet"):
        raise UsageError(f"--output {output}: the name must end in .jsonl or .parquet")
    try:
        prompts, notes = read_ledger(directory, history)
        if not prompts:
            none = f"{directory.path} has no ledger: no GRPO, RLOO or AsyncGRPO trainer has trained"
            raise RunDirectoryError(" ".join(notes) or none)
        if output is not None:
            _write(output, prompts)
            print(output)
            return 0
    except OSError as error:
        raise RunDirectoryError(f"{error.filename or output}: {error.strerror or error}") from None
    sums = summary(prompts)
    print(json.dumps(sums, indent=2) if options.json else "\n".join([*sentences(sums), *notes]))
    return 0


def _write(file: Path, prompts: Sequence[PromptLine]) -> None:
    rows = map(as_json, prompts)
    if file.suffix == ".jsonl":
        replace_file(file, "".join(f"{json.dumps(row)}\n" for row in rows).encode())
        return
    from datasets import Dataset

    Dataset.from_list(list(rows)).to_parquet(str(file))
