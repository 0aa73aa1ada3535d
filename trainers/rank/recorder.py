"""Log every collective that this rank issues from Python, with its source line and waiting thread.

Installed by the session when `torch.distributed` is imported. Wraps the methods of torch's process group and
`Work.wait`. Collectives that C++ issues, such as DDP's gradient all-reduces, appear only in torch's Flight
Recorder; `backward` logs each DDP backward pass as a whole. Does not change what a collective does.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

from grpo_run.runtime.board.slot_writer import SlotWriter
from grpo_run.trainers import upstream
from grpo_run.watchdog.deadlocks.collectives import CollectiveProgress
from grpo_run.watchdog.evidence.source import is_outside_frameworks

MAX_TRACKED = 256
"""Number of `Work` handles that are tracked until their `wait`; the oldest are dropped first."""
MAX_FRAMES = 60
"""Number of frames that are searched for the caller."""
MAX_TENSORS = 4
"""Sizes of more tensors are not logged, because logging hundreds would take longer than the collective."""


class Recorder:
    """Writes the collective log of this rank's slot.

    Args:
        warn: called once if a collective cannot be logged.
    """

    def __init__(self, slot: SlotWriter, warn: Callable[[str], None] = lambda text: None) -> None:
        self._slot = slot
        self._warn = warn
        self._warned = False
        self._log = slot.collective_log
        self._is_caller: dict[CodeType, bool] = {}
        self._groups: dict[str, tuple[int, bool, bool]] = {}
        self._tracked: dict[int, tuple[int, bool, weakref.ref[Any]]] = {}

    def install(self, c10d: Any) -> None:
        """Wrap torch's process group methods and `Work.wait`.

        Args:
            c10d: the module `torch._C._distributed_c10d`.
        """
        for name in upstream.COLLECTIVE_METHODS:
            if hasattr(c10d.ProcessGroup, name):
                setattr(c10d.ProcessGroup, name, self._logging(getattr(c10d.ProcessGroup, name), name))
        original_wait = c10d.Work.wait

        @functools.wraps(original_wait)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            key = id(work)
            number, on_host, tracked = self._tracked.get(key, (0, True, None))
            # a new handle at the address of a freed one; or a wait with a time limit, which will return
            if tracked is None or tracked() is not work or args or kwargs:
                return original_wait(work, *args, **kwargs)
            self._log.mark(number, CollectiveProgress.waiting)
            try:
                result = original_wait(work)
            except BaseException:
                # not completed, but no thread waits any more
                self._log.mark(number, CollectiveProgress.enqueued)
                raise
            self._tracked.pop(key, None)
            # on a device, wait() only orders streams and returns; the Flight Recorder knows when the work is
            # done
            self._log.mark(number, CollectiveProgress.completed if on_host else CollectiveProgress.enqueued)
            return result

        c10d.Work.wait = wait

    def _logging(self, original: Any, name: str) -> Any:
        @functools.wraps(original)
        def issue(group: Any, *args: Any, **kwargs: Any) -> Any:
            number, on_host = self._try_log(group, name, args)
            work = original(group, *args, **kwargs)
            if work is not None and number:
                self._try_track(work, number, on_host)
            return work

        return issue

    def _try_log(self, group: Any, name: str, args: tuple[Any, ...]) -> tuple[int, bool]:
        """Log a collective; return number 0 if that fails, as logging must not prevent the collective."""
        try:
            return self.log(group, name, args)
        except Exception as error:  # noqa: BLE001 - a foreign process group may raise anything
            self._warn_once(name, error)
            return 0, True

    def _try_track(self, work: Any, number: int, on_host: bool) -> None:
        try:
            self.track(work, number, on_host)
        except Exception as error:  # noqa: BLE001 - the caller must get its handle
            self._warn_once("a Work handle", error)

    def _warn_once(self, what: str, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            self._warn(
                f"{what} could not be logged ({type(error).__name__}: {error}); other collectives may be missing too"
            )

    def track(self, work: Any, number: int, on_host: bool) -> None:
        """Mark the log entry as waiting while a thread waits for `work`.

        Args:
            number: of the log entry.
            on_host: whether the collective runs on the host, so that `wait` returns when it is complete.
        """
        if len(self._tracked) >= MAX_TRACKED:
            self._tracked.pop(next(iter(self._tracked)), None)
        self._tracked[id(work)] = (number, on_host, weakref.ref(work))

    def log(self, group: Any, operation: str, args: tuple[Any, ...]) -> tuple[int, bool]:
        """Log a collective that is about to be issued on a torch process group.

        Args:
            operation: name of the process group method.
            args: its positional arguments.

        Returns:
            The number of the log entry, and whether the collective runs on the host.
        """
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
        return self._log.add(
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
            point_to_point=ambiguous,  # sequence numbers of several backends are not comparable, as with point-to-point operations
        )

    def _caller(self, frame: FrameType | None) -> FrameType | None:
        """Return the innermost frame outside torch, its wrappers, Python and grpo-run."""
        for _ in range(MAX_FRAMES):
            if frame is None:
                return None
            code = frame.f_code
            known = self._is_caller.get(code)
            if known is None:
                known = self._is_caller[code] = is_outside_frameworks(code.co_filename)
            if known:
                return frame
            frame = frame.f_back
        return None

    def log_own(
        self, group: str, sequence: int, operation: str, tensor: Any, work: Any, *, members: int
    ) -> None:
        """Log a collective of grpo-run's own groups, which torch's Python layer does not know.

        Args:
            work: the handle that torch returned.
            members: global ranks of the group as a bit mask; 0 beyond 64 ranks.
        """
        try:
            number = self._add(group, sequence, operation, [tensor], members)
        except Exception as error:  # noqa: BLE001 - the vote must not fail with its log entry
            self._warn_once("a vote", error)
            return
        self._try_track(work, number, True)

    @contextlib.contextmanager
    def backward(self, model: Any) -> Iterator[None]:
        """Log a DDP backward pass as one entry, which starts at the group's next sequence number.

        Other models are not logged: FSDP has a process group too, but issues its collectives from Python.
        """
        number = 0
        if type(model).__name__ == "DistributedDataParallel":
            number, _ = self._try_log(model.process_group, "backward", ())
        try:
            yield
        finally:
            if number:
                self._log.mark(number, CollectiveProgress.completed)


def _facts(group: Any) -> tuple[int, bool, bool]:
    """Return facts about a torch process group.

    Returns:
        Its global ranks as a bit mask (0 beyond 64 ranks), whether its default backend runs on the host, and
        whether it has several backends.
    """
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
"""Torch's C++ names of dtypes, as in the Flight Recorder."""


def _dtype(tensor: Any) -> str:
    name = str(tensor.dtype).rpartition(".")[2]
    return _DTYPES.get(name, name)
