"""The rollout server in a rank: its address in the script's configurations, and what is done with it on the
board and in the journal.

The address is set where a configuration is built (`transformers.TrainingArguments`, from which those of all
of TRL's trainers derive), before TRL reads it. Trainers that generate with another server, which the script
names, are watched alike. Which weights rollouts come from is proved in `_custody.py`, for trainers that send
weights to a server and wait for them (`vllm_mode="server"`). AsyncGRPO generates in a process of its own
while the weights change: `_adapters.py`. In a rehearsal, a server that the run has not started is refused
before it is sent anything. Imports nothing heavy: the script imports torch first.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import wrapt

from grpo_run.runtime.features.rollout_server import _async
from grpo_run.runtime.features.rollout_server._limits import Limits
from grpo_run.runtime.features.rollout_server._process import free_port
from grpo_run.runtime.features.rollout_server.events import ServerUsed
from grpo_run.runtime.features.rollout_server.settings import NAME, RankServer, RolloutServerSettings
from grpo_run.runtime.launch.rehearsal import Rehearsal, current
from grpo_run.runtime.rank.points import CallPoints, RankFeature, RolloutPoints
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.upstream import async_grpo_names, vllm_names
from grpo_run.runtime.upstream.patches import wrapped_methods
from grpo_run.watchdog.observation import Phase

LOOPBACK = ("127.0.0.1", "localhost")


def server_of(session: Session) -> RankServer | None:
    """Return the server that the run has started."""
    told = session.settings.features.get(NAME)
    return RankServer.model_validate(told) if told else None


def uses_server(configuration: Any) -> bool:
    """Whether trainers with this configuration generate with a server. AsyncGRPO always does."""
    return (
        hasattr(configuration, vllm_names.BASE_URL)
        and bool(getattr(configuration, "use_vllm", True))
        and getattr(configuration, "vllm_mode", "server") == "server"
    )


def address_of(configuration: Any) -> str:
    """Return the address of the server that a configuration names."""
    url = getattr(configuration, vllm_names.BASE_URL)
    host, port = (getattr(configuration, name, "") for name in (vllm_names.HOST, vllm_names.PORT))
    return str(url or f"http://{host}:{port}").rstrip("/")


def set_address(configuration: Any, server: RankServer, start_seconds: float) -> str:
    """Let a configuration name the run's server; return the address that the script has named, or "".

    Each gets another port for the group through which TRL sends weights: a trainer keeps its own open.
    """
    fields = {one.name: one.default for one in dataclasses.fields(configuration)}
    own = [vllm_names.BASE_URL, vllm_names.HOST, vllm_names.PORT]
    names = any(getattr(configuration, name, None) not in (fields.get(name), server.base_url) for name in own)
    named = address_of(configuration) if names else ""
    setattr(configuration, vllm_names.BASE_URL, server.base_url)
    if vllm_names.GROUP_PORT in fields:
        setattr(configuration, vllm_names.GROUP_PORT, free_port())
    seconds = max(start_seconds, getattr(configuration, vllm_names.SERVER_TIMEOUT, 0.0))
    setattr(configuration, vllm_names.SERVER_TIMEOUT, seconds)
    return named


def leave_proxies_out(base_url: str) -> None:
    """Let no proxy stand between this process, or one that it starts, and a server on this machine."""
    names = ("no_proxy", "NO_PROXY")
    hosts = dict.fromkeys((*LOOPBACK, urlsplit(base_url).hostname or ""))
    either = next((os.environ[name] for name in names if os.environ.get(name)), "")
    for name in names:  # of two, most programs read the first only: it must not hide what the other lists
        listed = [one for one in (os.environ.get(name) or either).split(",") if one]
        if listed != ["*"]:  # no proxy for any host, if it stands alone
            listed += [one for one in hosts if one not in listed]
        os.environ[name] = ",".join(listed)


class RolloutServerPart(RankFeature):
    """The rollout server at the points of a rank."""

    name = NAME

    def __init__(self) -> None:
        self._limits = Limits()
        self._custody: Any = None

    def script_begins(self, session: Session) -> None:
        """Set the address in the configurations that the script will build, and limit requests."""
        server = server_of(session)
        if server is not None:
            leave_proxies_out(server.base_url)
            self._limits.servers.add(server.base_url)
        wrapt.register_post_import_hook(self._limits.install, "requests.sessions")
        hook = functools.partial(self._address, session, server)
        wrapt.register_post_import_hook(hook, "transformers.training_args")
        if (rehearsal := current()) is not None:
            own = "" if server is None else server.base_url
            for name in vllm_names.CLIENT_MODULES:
                wrapt.register_post_import_hook(functools.partial(check_clients, rehearsal, own), name)

    def _address(self, session: Session, server: RankServer | None, module: Any) -> None:
        original = module.TrainingArguments.__post_init__
        start_seconds = session.config.of(RolloutServerSettings).start_seconds
        tell = functools.cache(session.notify)

        @functools.wraps(original)
        def addressed(configuration: Any, *args: Any, **kwargs: Any) -> Any:
            if uses_server(configuration):
                if server is None and (rehearsal := current()) is not None:
                    rehearsal.check_server(address_of(configuration))
                if server is not None and (named := set_address(configuration, server, start_seconds)):
                    tell(f"--rollout-server: the script names {named}; {server.base_url} is used instead")
                self._limits.servers.add(address_of(configuration))
            return original(configuration, *args, **kwargs)

        module.TrainingArguments.__post_init__ = addressed

    def check_trainer(self, session: Session, trainer: Any) -> None:
        """Say so if the run's server is not used."""
        if server_of(session) is not None and not uses_server(trainer.args):
            session.warn(f"--rollout-server: {type(trainer).__name__} does not generate with a server")

    def call(self, session: Session, points: CallPoints) -> None:
        """Mark where weights are sent, and prove which ones a server holds."""
        trainer, self._custody = points.trainer, None
        if trainer is None:
            return
        mark = functools.partial(_marked, session)
        of_async = {name: [mark] for name in vllm_names.ASYNC_SYNCS}
        points.hooks.enter_context(wrapped_methods(trainer, of_async))
        if hasattr(trainer, async_grpo_names.SENDS_ADAPTERS):
            # like `_custody`, it imports torch, which only the script may import first
            from grpo_run.runtime.features.rollout_server._adapters import AsyncCustody

            custody = AsyncCustody(session, points)
            if session.is_main:
                _async.prepare(trainer, points.hooks, session.notify, custody.took)
        generation = getattr(trainer, vllm_names.GENERATION, None)
        if generation is not None:
            points.hooks.enter_context(wrapped_methods(generation, {vllm_names.SYNC: [mark]}))
        if uses_server(trainer.args):
            if session.is_main:
                server, address = server_of(session), address_of(trainer.args)
                own = server is not None and server.base_url == address
                adapters = async_grpo_names.sends_adapters(trainer)
                session.journal.write(
                    ServerUsed(rank=0, base_url=address, started_by_run=own, adapters=adapters)
                )
            if generation is not None:
                from grpo_run.runtime.features.rollout_server._custody import Custody

                self._custody = Custody(session, points)

    def rollouts(self, trainer: Any, session: Session, train_call: int, points: RolloutPoints) -> None:
        """Judge each rollout of a trainer whose server is asked."""
        if self._custody is not None and points.facts.has_rollouts:
            points.inputs.append(self._custody.make)


def check_clients(rehearsal: Rehearsal, own: str, module: Any) -> None:
    """Let TRL's clients send weights to the run's own server only, whoever makes them; others may be asked.

    Args:
        own: address of the server that the run has started; "" for none.
    """
    kind = getattr(module, vllm_names.CLIENT_CLASS)
    original = getattr(kind, vllm_names.JOIN)

    @functools.wraps(original)
    def checked(client: Any, *args: Any, **kwargs: Any) -> Any:
        if client.base_url.rstrip("/") != own:
            rehearsal.check_server(client.base_url)
        return original(client, *args, **kwargs)

    setattr(kind, vllm_names.JOIN, checked)


def _marked(session: Session, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Send weights, in a phase of its own."""
    session.slot.enter(Phase.weight_sync)
    try:
        return original(*args, **kwargs)
    finally:
        session.slot.leave(Phase.weight_sync)


PART = RolloutServerPart()
