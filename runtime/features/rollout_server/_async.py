"""AsyncGRPO in rank 0: the process that makes its rollouts, and what earlier ranks have left on the server.

    prepare         both of the following, on rank 0
    watch_process   TRL looks every 5 s whether its process has failed, and not at all whether it was killed;
                    then it waits for ever for an answer of a dead process. Here its end is an error at once,
                    and an error of the trainer is its end
    take_back       the server still holds the adapters of a rank that was killed, and may be paused. The next
                    one would send an adapter of the same name, which vLLM refuses

Called by `rank.py` before a trainer trains. Marks nothing on the board, and judges no server.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from grpo_run.runtime.features.rollout_server._watch import ServerError, request
from grpo_run.runtime.upstream import async_grpo_names
from grpo_run.runtime.upstream.patches import override_attributes, wrapped_methods
from grpo_run.watchdog.diagnosis.exits import signal_name

POLL_SECONDS = 1.0
"""How long the trainer waits for a rollout before it looks whether the process lives; TRL: 5."""
KILL_SECONDS = 10.0
"""How long a killed process may take to exit."""
TAKE_BACK_SECONDS = 60.0
"""For each request to a server that nobody uses; TRL has no limit, or one of half an hour."""

Ask = Callable[..., tuple[int, bytes]]
"""`_watch.request` to one server: takes a method, a route and a body; returns the status and what came."""


def prepare(
    trainer: Any, hooks: ExitStack, say: Callable[[str], None], took: Callable[[Any], None] = lambda _: None
) -> None:
    """Do what this module does for a trainer; nothing for one that is not AsyncGRPO's.

    Raises:
        OSError, ServerError: the server does not answer, or does not let go of an adapter.
    """
    watch_process(trainer, hooks, took)
    if (place := async_grpo_names.adapter_folder(trainer)) is None:
        return
    url, folder = place
    if found := take_back(folder, functools.partial(request, url, seconds=TAKE_BACK_SECONDS)):
        say(f"the rollout server has unloaded what earlier ranks had sent: {', '.join(found)}")


def watch_process(trainer: Any, hooks: ExitStack, took: Callable[[Any], None] = lambda _: None) -> None:
    """Let a trainer notice that the process of its rollouts has ended, until `hooks` are closed.

    Args:
        took: called with each sample that it takes.
    """
    worker: Any = getattr(trainer, async_grpo_names.WORKER, None)
    buffer: Any = getattr(worker, async_grpo_names.BUFFER, None)
    if not hasattr(buffer, "get"):
        return

    def check(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)  # it knows the exception of a process that has failed
        if (how := how_ended(async_grpo_names.rollout_process(worker))) is not None:
            raise RuntimeError(f"the process that makes the rollouts {how}")

    def stop(original: Callable[..., Any]) -> None:
        process = async_grpo_names.rollout_process(worker)
        if process is not None and sys.exc_info()[0] is not None:
            # TRL would wait 15 s for it: it does not listen while its queue is full
            process.kill()
            process.join(KILL_SECONDS)
        # otherwise TRL sets an event, and waits until the dead process has seen it
        if how_ended(process) is not None:
            async_grpo_names.forget_process(worker)
        original()

    get = buffer.get

    def get_soon(block: bool = True, timeout: float | None = None) -> Any:
        sample = get(block, timeout if timeout is None else min(timeout, POLL_SECONDS))
        took(sample)
        return sample

    handlers = {async_grpo_names.HEALTH: [check], async_grpo_names.STOP: [stop]}
    hooks.enter_context(wrapped_methods(worker, handlers))
    hooks.enter_context(override_attributes(buffer, get=get_soon))


def how_ended(process: Any | None) -> str | None:
    """Return how a process has ended, as the end of a sentence; None if it lives or never lived."""
    code = None if process is None else process.exitcode
    if code is None:
        return None
    if code >= 0:
        return f"has exited with code {code}"
    return f"was killed by {signal_name(-code)}"


def take_back(folder: str, ask: Ask) -> list[str]:
    """Let a server forget the adapters that earlier ranks have sent from a folder, and go on if their end has
    left it paused; return the names of the adapters.

    Adapters from elsewhere are left: they may belong to a trainer that lives, as may the pause of a server
    that holds none of this folder. Nothing else sends from this folder, because the trainer writes there.

    Raises:
        OSError, ServerError: the server does not answer.
        ServerError: it does not let go of an adapter.
    """
    status, body = ask("GET", "/v1/models")
    try:
        cards = json.loads(body)["data"] if status == 200 else []
        found = [str(one["id"]) for one in cards if _is_inside(str(one.get("root") or ""), folder)]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ServerError("/v1/models cannot be read") from error
    if not found:
        return []
    status, body = ask("GET", "/is_paused")
    if status == 200 and json.loads(body).get("is_paused"):
        ask("POST", "/resume")
    for name in found:
        status, _ = ask("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        if status not in (200, 404):  # 404: it has none of this name any more
            raise ServerError(f"the server does not let go of the adapter {name} ({status})")
    return found


def _is_inside(path: str, folder: str) -> bool:
    return path.startswith(folder.rstrip(os.sep) + os.sep)
