"""Match a `train()` call with those that the run has started before, on rank 0 for all ranks.

A script need not repeat its calls in the same order: it may skip a stage whose result exists. A call is
recognized by its trainer's class and output directory, and keeps its number in the run. Each known call is
recognized once:

1. a call of the same class in the same directory;
2. the call that wrote the checkpoints of this run in the directory, if that was moved or mounted elsewhere;
3. a call of the same class with equal settings (by digest, which tells apart a loop over seeds or models),
   whose directory has another name only because each start of the script makes another one;
4. else it is a new call, with the next free number.

In rule 3, two names count as one only with evidence: the part that differs is the time at which each was
chosen, the process id, or random by its form. `fold-1` and `fold-2` are two directories. Also judges
whether a call that starts from step 0 should not. Pure, except for the manifests that it reads. Called by
`runtime/rank/step/resume.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from grpo_run.runtime.call_names import call_title
from grpo_run.runtime.checkpoints.manifest import TrainCall
from grpo_run.runtime.checkpoints.search import directories_of_run, find_checkpoints
from grpo_run.runtime.history.train_calls import CallDirectory, KnownCall
from grpo_run.runtime.memory.script_settings import original_settings
from grpo_run.runtime.upstream import vllm_names

RANDOM = re.compile(
    r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}"  # uuid4()
    r"|(?<![0-9A-Za-z])(?=[0-9]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{8,40}(?![0-9A-Za-z])"  # also shortened
)
TEMPORARY_CHARACTERS = 8
"""Of a name by `tempfile.mkdtemp`."""
NUMBER = re.compile(r"[0-9]{10}\.[0-9]+|[0-9]+")
MARGIN_SECONDS = 60.0
"""A name may have the minute before or after."""
MAX_MINUTES = 720
"""How far back a name may have been chosen, if only its minute is known."""
MAX_SECONDS = 3600
"""The same with its second."""
DATES = ("%Y%m%d", "%d%m%Y", "%m%d%Y", "%y%m%d", "%m%d", "%d%m")
MINUTES = ("%H%M", "%I%M")
SECONDS = ("%H%M%S", "%I%M%S")
FRACTION_DIGITS = (3, 6, 9)


def is_same_directory(old: CallDirectory, new: CallDirectory) -> bool:
    """Return whether the names of two directories differ only in a part that is made at each start."""
    parts, others = Path(old.path).parts, Path(new.path).parts
    if len(parts) != len(others):
        return False
    differing = [index for index, pair in enumerate(zip(parts, others, strict=True)) if pair[0] != pair[1]]
    return bool(differing) and all(
        _differs_by_itself(parts[index], others[index], old, new)
        or _is_temporary(Path(*parts[:index]), parts[index], others[index])
        for index in differing
    )


def _differs_by_itself(part: str, other: str, old: CallDirectory, new: CallDirectory) -> bool:
    plain, other_plain = RANDOM.sub("<random>", part), RANDOM.sub("<random>", other)
    if plain == other_plain:
        return True
    if NUMBER.sub("#", plain) != NUMBER.sub("#", other_plain):
        return False
    numbers = list(zip(NUMBER.findall(plain), NUMBER.findall(other_plain), strict=True))
    differing = [
        index
        for index, (a, b) in enumerate(numbers)
        if a != b and not (old.pid and (a, b) == (str(old.pid), str(new.pid)))
    ]
    return _are_times([a for a, _ in numbers], differing, old) and _are_times(
        [b for _, b in numbers], differing, new
    )


def _are_times(numbers: list[str], differing: list[int], directory: CallDirectory) -> bool:
    """Whether all numbers at the indexes `differing` are parts of the time at which the name was chosen."""
    began, ended = directory.not_before - MARGIN_SECONDS, directory.not_after + MARGIN_SECONDS
    starts = [0, *accumulate(map(len, numbers))]
    digits = "".join(numbers)
    covered = [False] * len(digits)
    for text in set(_times_of(began, ended)):
        at = digits.find(text)
        while at >= 0:
            covered[at : at + len(text)] = [True] * len(text)
            at = digits.find(text, at + 1)
    is_time = [all(covered[starts[index] : starts[index + 1]]) for index in range(len(numbers))]
    for index, number in enumerate(numbers):
        if (len(number) in (10, 13) or "." in number) and began <= int(
            number[:10]
        ) <= ended:  # since the epoch
            is_time[index] = True
        elif index and is_time[index - 1]:  # a fraction of a second has any digits
            is_time[index] |= len(number) in FRACTION_DIGITS
    return all(is_time[index] for index in differing)


def _times_of(began: float, ended: float) -> Iterator[str]:
    """Yield every date and time of day of a period, in local time and in UTC."""
    seconds = int(ended - began) + 1
    for forms, step, count in (
        ((*DATES, *MINUTES), 60, min(MAX_MINUTES, seconds // 60 + 1)),
        (SECONDS, 1, min(MAX_SECONDS, seconds)),
    ):
        for back in range(count):
            for clock in (time.localtime(ended - back * step), time.gmtime(ended - back * step)):
                for form in forms:
                    yield time.strftime(form, clock)


def _is_temporary(parent: Path, part: str, other: str) -> bool:
    """Whether both are names that `tempfile.mkdtemp` makes in the folder of temporary files."""
    if str(parent) not in {tempfile.gettempdir(), str(Path(tempfile.gettempdir()).resolve())}:
        return False
    random, other_random = part[-TEMPORARY_CHARACTERS:], other[-TEMPORARY_CHARACTERS:]
    return (
        part[:-TEMPORARY_CHARACTERS] == other[:-TEMPORARY_CHARACTERS]
        and re.fullmatch(r"[a-z0-9_]{8}", random) is not None
        and re.fullmatch(r"[a-z0-9_]{8}", other_random) is not None
    )


@dataclass(frozen=True, kw_only=True)
class IdentifiedCall:
    """A call with its number in the run.

    Attributes:
        call: with this number.
        known: what the run knows of it; None for a call that was not begun before.
        moved_from: the directory in which its checkpoints are, if the script has given it another one now.
        lost: the call that this one seems to repeat from step 0, in another directory.
        repeats: it certainly does, because a later or the same call was interrupted.
        skipped: the interrupted call that the script has left out.
    """

    call: TrainCall
    known: KnownCall | None = None
    moved_from: str | None = None
    lost: KnownCall | None = None
    repeats: bool = False
    skipped: KnownCall | None = None

    @property
    def directories(self) -> tuple[Path, ...]:
        """The directories that the call has used before, newest first."""
        return () if self.known is None else tuple(Path(one.path) for one in self.known.directories)


def identify(
    call: TrainCall,
    known_calls: Sequence[KnownCall],
    claimed: Iterable[int],
    *,
    settings: str,
    directory: CallDirectory,
    run_id: str,
) -> IdentifiedCall:
    """Return the call with its number in the run.

    Args:
        call: numbered by its position in the script.
        known_calls: of this run, from earlier attempts.
        claimed: numbers of the calls that were recognized in this attempt.
        settings: digest of the trainer's settings.
        directory: of the call, in this attempt.
        run_id: of this run.
    """
    taken = set(claimed)
    free = [one for one in known_calls if one.ordinal not in taken]
    same_class = [one for one in free if one.trainer_class == call.trainer_class]
    here = [one for one in same_class if directory.path in {used.path for used in one.directories}]
    known = next((one for one in here if one.settings == settings), here[0] if here else None)
    moved_from = None
    if known is None:
        ordinal = _owner_of_checkpoints(call, run_id)
        known = next((one for one in same_class if one.ordinal == ordinal), None)
        if (
            known is None
            and ordinal is not None
            and ordinal not in {one.ordinal for one in known_calls} | taken
        ):
            return IdentifiedCall(call=call.model_copy(update={"ordinal": ordinal}))
    if known is None and settings:
        known = next(
            (
                one
                for one in same_class
                if one.settings == settings
                and one.directories
                and is_same_directory(one.directories[0], directory)
            ),
            None,
        )
        moved_from = known.directories[0].path if known is not None else None
    ordinal = (
        known.ordinal if known is not None else max([0, *taken, *(one.ordinal for one in known_calls)]) + 1
    )
    interrupted = next((one for one in free if one.interrupted and one is not known), None)
    lost = skipped = None
    if known is None:
        # a finished call only at the same position and with equal settings: a loop may have gone on to its
        # next call
        finished = (one for one in same_class if one.finished and one.settings == settings)
        lost = next((one for one in same_class if one is interrupted and one.saved), None) or next(
            (one for one in finished if interrupted is not None or one.ordinal == call.ordinal), None
        )
    if interrupted is not None and lost is None and ordinal > interrupted.ordinal:
        # a call of the same class without a checkpoint may be this one, which has nothing to continue
        skipped = interrupted if interrupted.saved or interrupted not in same_class else None
    return IdentifiedCall(
        call=call.model_copy(update={"ordinal": ordinal}),
        known=known,
        moved_from=moved_from,
        lost=lost,
        repeats=interrupted is not None,
        skipped=skipped,
    )


def _owner_of_checkpoints(call: TrainCall, run_id: str) -> int | None:
    """Return the number of the call that wrote the newest checkpoint of this run and class in the
    directory."""
    for found in find_checkpoints(*directories_of_run(run_id, Path(call.output_dir))):
        if found.manifest.run_id == run_id and found.manifest.train_call.trainer_class == call.trainer_class:
            return found.manifest.train_call.ordinal
    return None


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """What the run has and a call does not continue, in one line.

    Attributes:
        serious: work of this run is done again, or left out. Otherwise the script may have meant it.
    """

    text: str
    serious: bool = True


def find_mismatch(
    identified: IdentifiedCall, *, step: int, rejected: bool, output_dir: str
) -> Mismatch | None:
    """Return how a call does not continue what the run has; None if it does.

    Args:
        step: from which the call starts.
        rejected: checkpoints were rejected, and said so.
        output_dir: the call's, as the script has it.
    """
    known, call, lost, skipped = identified.known, identified.call, identified.lost, identified.skipped
    name = call_title(call.ordinal, call.trainer_class, output_dir)
    if lost is not None and step == 0:
        state = "is finished" if lost.finished else f"was interrupted at {lost.progress}"
        return Mismatch(
            text=(
                f"{name} starts from step 0, although {lost.place} of this run {state}: the checkpoints are"
                f" in another output_dir ({_newest(lost)}); give the call the same output_dir in every"
                " attempt"
            ),
            serious=identified.repeats,
        )
    if skipped is not None:
        return Mismatch(
            text=(
                f"{skipped.place} was interrupted at {skipped.progress}, and the script continues with {name}"
                f" instead of continuing it ({_newest(skipped)}); let the script skip a stage only if it is"
                " complete"
            )
        )
    if known is not None and known.saved > step and not (rejected and step):
        gone = (
            f"{known.checkpoint} is gone or cannot be used"
            if known.checkpoint
            else "its snapshot in memory is lost"
        )
        return Mismatch(
            text=(
                f"{name} starts from step {step}, although this run has saved step {known.saved} of it:"
                f" {gone}"
            ),
            serious=step == 0,  # an older checkpoint is what another machine has, where the memory is gone
        )
    return None


def _newest(call: KnownCall) -> str:
    if not call.saved:
        return "no checkpoint of it exists"
    return f"the newest is {call.checkpoint}" if call.checkpoint else f"the newest is of step {call.saved}"


NAMES = frozenset(
    {
        "output_dir", "logging_dir", "run_name", "hub_model_id", "project", "trackio_space_id",
        vllm_names.BASE_URL, vllm_names.GROUP_PORT, vllm_names.SERVER_TIMEOUT,
    }
)  # fmt: skip
"""Settings that name the run or its place, often with the time or a free port."""
ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def settings_digest(trainer: Any) -> str:
    """Return a digest of the trainer's arguments and of its data's size; empty if there are none.

    The model is not part of it: its path may be in another stage's directory. Checkpoints tell its shape.
    """
    arguments: Any = getattr(trainer, "args", None)
    if not hasattr(arguments, "to_dict"):
        return ""
    # whatever a plan has changed of them, it is the same call
    settings = {**arguments.to_dict(), **original_settings(arguments)}
    values = {name: value for name, value in settings.items() if name not in NAMES}
    dataset = getattr(trainer, "train_dataset", None)
    values["examples"] = len(dataset) if isinstance(dataset, Sized) else None
    values["columns"] = list(getattr(dataset, "column_names", None) or ())
    text = ADDRESS.sub("", json.dumps(values, sort_keys=True, default=repr))
    output_dir = str(arguments.output_dir)
    for name in (output_dir, os.path.basename(os.path.normpath(output_dir))):
        text = text.replace(json.dumps(name)[1:-1], "<output_dir>") if len(name) > 2 else text
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]
