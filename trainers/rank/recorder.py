"""Notes every collective that a rank issues from Python: what, where in the code, and whether a thread waits for it.

Installed by the session once `torch.distributed` is there. Wraps the methods of torch's process group and `Work.wait`
and calls through; collectives that C++ issues (DDP's gradients) are known to torch's Flight Recorder alone,
so the guard notes DDP's backward as a whole. Also starts torch's worker server, which hands the Flight Recorder
out from C++ threads while Python is stuck. Does not change what a collective does.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

from grpo_run.runtime.board.slot_writer import SlotWriter
from grpo_run.trainers import upstream
from grpo_run.watchdog.deadlocks.collectives import CollectiveProgress
from grpo_run.watchdog.evidence.source import is_outside_frameworks

MAX_UNWAITED = 256
"""Collectives whose `Work` may be kept for a later `wait`; the oldest are forgotten."""
MAX_FRAMES = 60
MAX_TENSORS = 4
"""Of more, sizes are not noted: a coalesced call of hundreds would take longer to write down than to do."""


class Recorder:
    """Writes one slot's notes.

    Args:
        slot: of this rank.
        warn: told once of a collective that could not be noted.
    """

    def __init__(self, slot: SlotWriter, warn: Callable[[str], None] = lambda text: None) -> None:
        self._slot = slot
        self._warn = warn
        self._warned = False
        self._notes = slot.collective_log
        self._plain: dict[CodeType, bool] = {}
        self._groups: dict[str, tuple[int, bool, bool]] = {}
        self._unwaited: dict[int, tuple[int, bool, weakref.ref[Any]]] = {}

    def install(self, c10d: Any) -> None:
        """Wrap what torch's process groups do. `c10d` is `torch._C._distributed_c10d`."""
        for name in upstream.COLLECTIVE_METHODS:
            if hasattr(c10d.ProcessGroup, name):
                setattr(c10d.ProcessGroup, name, self._noting(getattr(c10d.ProcessGroup, name), name))
        original_wait = c10d.Work.wait

        @functools.wraps(original_wait)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            key = id(work)
            number, on_host, followed = self._unwaited.get(key, (0, True, None))
            # another's, at the address of one that is gone; or with a timeout of its own, which means to come back
            if followed is None or followed() is not work or args or kwargs:
                return original_wait(work, *args, **kwargs)
            self._notes.mark(number, CollectiveProgress.waiting)
            try:
                result = original_wait(work)
            except BaseException:
                self._notes.mark(
                    number, CollectiveProgress.enqueued
                )  # it never completed, and nobody waits any more
                raise
            self._unwaited.pop(key, None)
            # on a device `wait` only orders streams: the host goes on, and the recorder knows when it is done
            self._notes.mark(number, CollectiveProgress.completed if on_host else CollectiveProgress.enqueued)
            return result

        c10d.Work.wait = wait

    def _noting(self, original: Any, name: str) -> Any:
        @functools.wraps(original)
        def issue(group: Any, *args: Any, **kwargs: Any) -> Any:
            number, on_host = self._try_note(group, name, args)
            work = original(group, *args, **kwargs)
            if work is not None and number:
                self._try_follow(work, number, on_host)
            return work

        return issue

    def _try_note(self, group: Any, name: str, args: tuple[Any, ...]) -> tuple[int, bool]:
        """Note it if it can be noted: a collective is never kept from happening. The number is 0 if not."""
        try:
            return self.note(group, name, args)
        except Exception as error:  # noqa: BLE001 - a process group of somebody else's making may raise anything
            self._give_up(name, error)
            return 0, True

    def _try_follow(self, work: Any, number: int, on_host: bool) -> None:
        try:
            self.follow(work, number, on_host)
        except Exception as error:  # noqa: BLE001 - nor is its handle kept from whoever asked for it
            self._give_up("a handle", error)

    def _give_up(self, what: str, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            self._warn(
                f"{what} could not be noted ({type(error).__name__}: {error}); others may not be either"
            )

    def follow(self, work: Any, number: int, on_host: bool) -> None:
        """Mark the note when somebody waits for `work`."""
        if len(self._unwaited) >= MAX_UNWAITED:
            self._unwaited.pop(next(iter(self._unwaited)), None)
        self._unwaited[id(work)] = (number, on_host, weakref.ref(work))

    def note(self, group: Any, operation: str, args: tuple[Any, ...]) -> tuple[int, bool]:
        """Note a collective about to be issued on a torch process group; returns its number, and whether it runs on the host."""
        name = group.group_name
        known = self._groups.get(name)
        if known is None:
            known = self._groups[name] = _facts(group)
        members, on_host, ambiguous = known
        inputs = 1 if operation in upstream.OUTPUT_FIRST else 0
        tensors = _tensors(args[inputs]) if len(args) > inputs else []
        if tensors:
            on_host = tensors[0].device.type == "cpu"
        sequence = upstream.sequence_number(group) + 1
        number = self._add(
            name, sequence, operation, tensors, members, on_device=not on_host, ambiguous=ambiguous
        )
        return number, on_host

    def _add(
        self,
        group: str,
        sequence: int,
        operation: str,
        tensors: list[Any],
        members: int,
        *,
        on_device: bool = False,
        ambiguous: bool = False,
    ) -> int:
        frame = self._caller(sys._getframe(1))
        few = len(tensors) <= MAX_TENSORS
        return self._notes.add(
            group=group,
            sequence=sequence,
            operation=operation,
            sizes=";".join(",".join(map(str, tensor.shape)) for tensor in tensors) if few else "",
            dtypes=";".join(_dtype(tensor) for tensor in tensors) if few else "",
            file=frame.f_code.co_filename if frame else "",
            line=frame.f_lineno if frame else 0,
            function=frame.f_code.co_name if frame else "",
            step=self._slot.step + 1,
            members=members,
            on_device=on_device,
            point_to_point=ambiguous,  # its numbers are not shared either
        )

    def _caller(self, frame: FrameType | None) -> FrameType | None:
        """The innermost frame that belongs neither to torch and its wrappers, nor to Python, nor to us."""
        for _ in range(MAX_FRAMES):
            if frame is None:
                return None
            code = frame.f_code
            plain = self._plain.get(code)
            if plain is None:
                plain = self._plain[code] = is_outside_frameworks(code.co_filename)
            if plain:
                return frame
            frame = frame.f_back
        return None

    def vote(
        self, group: str, sequence: int, operation: str, tensor: Any, work: Any, *, members: int
    ) -> None:
        """Note one of our own votes, on a group torch's Python layer does not know."""
        try:
            number = self._add(group, sequence, operation, [tensor], members)
        except Exception as error:  # noqa: BLE001 - a vote that could not be noted is still a vote
            self._give_up("a vote", error)
            return
        self._try_follow(work, number, True)

    @contextlib.contextmanager
    def backward(self, model: Any) -> Iterator[None]:
        """Note DDP's backward: the gradients' all-reduces, from the group's next sequence number on."""
        number = 0
        # FSDP has a process group as well, and other habits
        if type(model).__name__ == "DistributedDataParallel":
            number, _ = self._try_note(model.process_group, "backward", ())
        try:
            yield
        finally:
            if number:
                self._notes.mark(number, CollectiveProgress.completed)


def _facts(group: Any) -> tuple[int, bool, bool]:
    """(global ranks as bits, 0 beyond 64 ranks; whether its default work runs on the host; several backends)."""
    import torch.distributed as dist

    ranks = dist.get_process_group_ranks(group)
    bits = 0 if max(ranks, default=64) >= 64 else sum(1 << rank for rank in ranks)
    backends = {part.rpartition(":")[2] for part in dist.get_backend_config(group).split(",")}
    return bits, dist.get_backend(group) == "gloo", len(backends) > 1


def _tensors(value: Any) -> list[Any]:
    if hasattr(value, "shape"):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for one in value for tensor in _tensors(one)]
    return []


_DTYPES = {
    "float32": "Float", "float64": "Double", "float16": "Half", "bfloat16": "BFloat16", "int64": "Long",
    "int32": "Int", "int16": "Short", "int8": "Char", "uint8": "Byte", "bool": "Bool",
}  # fmt: skip
"""Torch's C++ names, as the Flight Recorder writes them."""


def _dtype(tensor: Any) -> str:
    name = str(tensor.dtype).rpartition(".")[2]
    return _DTYPES.get(name, name)


def start_worker_server(path: str) -> Any:
    """Start torch's worker server on a unix socket; keep what is returned alive.

    Its first line is a warning to the person at the terminal, which says nothing to them.
    """
    from torch._C import _distributed_c10d

    sys.stderr.flush()
    kept, silent = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(silent, 2)
        return getattr(_distributed_c10d, upstream.WORKER_SERVER)(path)
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(silent)


def start_heartbeat(slot: SlotWriter, seconds: float) -> threading.Thread:
    """Keep saying that the interpreter runs, from a thread that needs nothing but the interpreter."""
    pause = threading.Event()

    def run() -> None:
        while True:
            slot.heartbeat()
            pause.wait(seconds)

    thread = threading.Thread(target=run, daemon=True, name="grpo-run-heartbeat")
    thread.start()
    return thread
