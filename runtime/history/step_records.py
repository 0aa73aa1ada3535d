"""What a run keeps of each step to compare a replay with: `steps/rank0.jsonl` of its run directory.

Written by each rank with `--keep-every` (`runtime/features/replay/`), and read by `step_comparison.py`.
Numbers are kept as the text of `float.hex`, which has every bit. Digests are those of
`runtime/rank/tensor_digests.py`. Plain data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from grpo_run.runtime.files import append_lines

MAX_FILE_BYTES = 64 * 1024 * 1024
"""At this size a file is begun anew; the old one is kept until the next time."""
DIGITS = 16
"""Of the digest of a tensor."""
UNSIGNED = (1 << 64) - 1


def digest_text(value: int) -> str:
    """Return a digest as it is recorded, in `DIGITS` digits."""
    return f"{value & UNSIGNED:0{DIGITS}x}"


class Sample(msgspec.Struct, frozen=True, omit_defaults=True):
    """One row that this rank has generated: digests of its texts, and its rewards by function.

    Attributes:
        number: among the rows of all ranks in the step.
        tokens: digest of those of prompt and completion.
    """

    prompt: str
    completion: str
    rewards: dict[str, str] = {}
    number: int = 0
    advantage: str | None = None
    tokens: str = ""


class Scored(msgspec.Struct, frozen=True):
    """The log-probabilities of one completion under the policy that is trained, in one forward pass.

    Attributes:
        tokens: as of its sample.
        digest: of the log-probabilities of the completion's tokens.
        total: their sum.
    """

    tokens: str
    digest: str
    total: str


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one rank has computed in a step.

    Attributes:
        samples: of the rollouts that were begun in the step.
        generations: samples of a prompt.
        scored: in the order of the forward passes.
        names: of the tensors whose digests follow; None if they are those of the line before.
        digests: after the step, one after another.
        starts: nothing was computed: this is what was loaded.
    """

    train_call: int
    step: int
    samples: list[Sample] = []
    generations: int = 0
    scored: list[Scored] = []
    loss: str | None = None
    grad_norm: str | None = None
    names: list[str] | None = None
    digests: str = ""
    starts: bool = False

    def tensors(self) -> dict[str, str]:
        """Return the digest of each tensor by its name."""
        parts = range(0, len(self.digests), DIGITS)
        return dict(zip(self.names or (), (self.digests[at : at + DIGITS] for at in parts), strict=True))


Records = dict[tuple[int, int], StepRecord]
"""By `train()` call and step."""


def append(file: Path, record: StepRecord) -> bool:
    """Append a line; return whether the next one is the first of a new file. Raises OSError."""
    file.parent.mkdir(mode=0o700, exist_ok=True)
    if append_lines(file, msgspec.json.encode(record) + b"\n") < MAX_FILE_BYTES:
        return False
    file.replace(file.with_suffix(".old"))
    return True


def read(folder: Path, rank: int) -> Records:
    """Return the records of a rank. Of a step that was done again, the last one counts, as for the run."""
    found: Records = {}
    for file in (folder / f"rank{rank}.old", folder / f"rank{rank}.jsonl"):
        names: list[str] | None = None
        for record in _lines(file):
            names = record.names or names
            found[record.train_call, record.step] = msgspec.structs.replace(record, names=names)
    return found


def _lines(file: Path) -> Iterator[StepRecord]:
    try:
        lines = file.read_bytes().splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        with contextlib.suppress(msgspec.DecodeError):  # a line that a kill has cut
            yield msgspec.json.decode(line, type=StepRecord)


def ranks(folder: Path) -> list[int]:
    """Return the ranks that have records."""
    return sorted({int(file.stem[4:]) for file in folder.glob("rank*.jsonl") if file.stem[4:].isdecimal()})
