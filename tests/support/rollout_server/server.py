"""The stand-in server: the routes of vLLM 0.31 that TRL and a launcher speak, for tiny models on the CPU.

    python tests/support/rollout_server/server.py MODEL --port 8000

MODEL is a folder that `save_pretrained` or `model.write` has written. Two processes, as in vLLM: this one
answers HTTP, the engine does the work (`engine.py`). If the engine dies, `/health` says so and this process
ends by itself soon; if it is stopped, `/health` stays well and what needs the engine hangs. What vLLM can do
and TRL does not ask for is refused. Options of `vllm serve` that it does not know are ignored.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

if __package__ != "support.rollout_server":  # by path, or as `tests.support…`
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy: tensors of this size need no threads

from support.rollout_server import engine as engine_process
from support.rollout_server.plants import Plants, from_environment

KEEP_ALIVE_SECONDS = 5.0
"""uvicorn closes a connection after so long without a request."""
BEGINS = time.time()


class EngineDeadError(Exception):
    """The engine is gone, and with it what was asked."""


class RefusedError(Exception):
    """A request that vLLM, or the stand-in, answers with 400."""


class EngineClient:
    """The engine, as the threads that answer HTTP see it."""

    def __init__(self, model: str, plants: Plants, listener: socket.socket) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        ours = self._pipe

        def run() -> None:  # in the fork: it must hold neither the port nor our end of the pipe
            listener.close()
            ours.close()
            engine_process.main(theirs, model, plants)

        self.process = multiprocessing.get_context("fork").Process(target=run, daemon=True)
        self.process.start()
        theirs.close()
        self.dead = threading.Event()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[threading.Event, list[Any]]] = {}
        self._lock = threading.Lock()
        try:
            self.max_model_len = self._pipe.recv()[2]
        except EOFError:
            self.process.join()
            raise SystemExit(
                "RuntimeError: Engine core initialization failed. See root cause above."
            ) from None
        threading.Thread(target=self._read, args=(self._pipe,), daemon=True).start()

    def _read(self, pipe: Connection) -> None:
        try:
            while True:
                number, succeeded, result = pipe.recv()
                event, answer = self._waiting.pop(number)
                answer += [succeeded, result]
                event.set()
        except (EOFError, OSError):
            self.dead.set()
            with self._lock:
                for event, _ in self._waiting.values():
                    event.set()

    def call(self, name: str, **body: Any) -> Any:
        """Ask the engine and wait as long as it takes.

        Raises:
            EngineDeadError: it is gone.
            RuntimeError: what it answers instead.
        """
        event, answer = threading.Event(), list[Any]()
        with self._lock:
            if self.dead.is_set():
                raise EngineDeadError
            number = next(self._numbers)
            self._waiting[number] = event, answer
            try:
                self._pipe.send((number, name, body))
            except OSError:
                raise EngineDeadError from None
        event.wait()
        if not answer:
            raise EngineDeadError
        succeeded, result = answer
        if not succeeded:
            raise RuntimeError(result)
        return result


class Server(ThreadingHTTPServer):
    """The port, the engine, and what is counted."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, options: argparse.Namespace, plants: Plants) -> None:
        super().__init__((options.host, options.port), Handler, bind_and_activate=False)
        self.options = options
        self.server_bind()  # vLLM takes the port at once, and listens when the engine is ready
        self.engine = EngineClient(options.model, plants, self.socket)
        self.totals: Counter[str] = Counter()
        self.server_activate()

    def server_bind(self) -> None:
        """Bind without asking a name server who we are."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that are gone."""


class Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    server: Server
    protocol_version = "HTTP/1.1"
    timeout = KEEP_ALIVE_SECONDS
    wbufsize = -1  # head and body leave together
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def log_error(self, format: str, *args: Any) -> None:
        """Do not mention connections that the client did not use again."""

    def log_message(self, format: str, *args: Any) -> None:
        """Print requests as uvicorn does, but not the probes."""
        if self.path not in ("/health", "/metrics"):
            print(f"INFO: {self.address_string()} - {format % args}", flush=True)

    def _answer(self, method: str) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        address = urlsplit(self.path)
        route = ROUTES.get((method, address.path))
        if address.path in DEVELOPMENT and os.environ.get("VLLM_SERVER_DEV_MODE") == "0":
            route = None
        if route is None:
            return self._send(404, {"detail": "Not Found"})
        query = {name: values[-1] for name, values in parse_qs(address.query).items()}
        try:
            content = route(self.server, {**query, **(json.loads(body) if body else {})})
        except (RefusedError, ValueError, TypeError, KeyError) as error:
            return self._send(400, failure(repr(error), "BadRequestError", 400))
        except (EngineDeadError, RuntimeError) as error:
            return self._send(500, failure(repr(error), "InternalServerError", 500))
        if isinstance(content, int):
            return self._send(content, None)
        return self._send(200, content)

    def _send(self, status: int, content: Any) -> None:
        text = isinstance(content, str)
        data = b"" if content is None else content.encode() if text else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; version=0.0.4" if text else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()


def failure(message: str, kind: str, code: int) -> dict[str, Any]:
    """Return vLLM's form of an error."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def health(server: Server, body: dict[str, Any]) -> int:
    """Whether the engine has not died; the engine is not asked."""
    return 503 if server.engine.dead.is_set() else 200


def models(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    """The only model, by the name on the command line."""
    name = server.options.served_model_name or server.options.model
    return {
        "object": "list",
        "data": [{
            "id": name, "object": "model", "created": int(BEGINS), "owned_by": "vllm", "parent": None,
            "root": server.options.model, "max_model_len": server.engine.max_model_len, "permission": [],
        }],
    }  # fmt: skip


def server_info(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    """The part of the configuration that matters to a trainer."""
    configuration = {
        "model_config": {
            "model": server.options.model, "dtype": "torch.float32", "seed": 0,
            "max_model_len": server.engine.max_model_len, "logprobs_mode": server.options.logprobs_mode,
            "max_logprobs": -1,
        },
        "parallel_config": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1},
        "weight_transfer_config": json.loads(server.options.weight_transfer_config),
    }  # fmt: skip
    as_json = body.get("config_format") == "json"
    return {
        "vllm_config": configuration if as_json else str(configuration), "vllm_env": {}, "system_env": {},
    }  # fmt: skip


def metrics(server: Server, body: dict[str, Any]) -> str:
    """Return what vLLM counts under these names."""
    labels = f'{{engine="0",model_name="{server.options.served_model_name or server.options.model}"}}'
    lines = []
    for name, kind in METRICS.items():
        family = name.removesuffix("_total")
        lines += [f"# HELP {family} Of the stand-in.", f"# TYPE {family} {kind}"]
        lines.append(f"{name}{labels} {float(server.totals[name])}")
    return "\n".join(lines) + "\n"


def completions(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    """Sample."""
    for name, harmless in NOT_SUPPORTED.items():
        if body.get(name) not in (None, *harmless):
            raise RefusedError(f"the stand-in does not support {name}={body[name]!r}")
    prompts = body["prompt"]
    if isinstance(prompts, list) and prompts and isinstance(prompts[0], int):
        prompts = [prompts]
    if not prompts or isinstance(prompts, str) or not all(p and isinstance(p, list) for p in prompts):
        raise RefusedError("prompts are lists of token ids here")
    longest = body["max_tokens"] if body.get("max_tokens") is not None else 16
    if max(map(len, prompts)) + longest > server.engine.max_model_len:
        raise RefusedError(f"longer than max_model_len={server.engine.max_model_len}")
    temperature = body.get("temperature")
    server.totals["vllm:num_requests_running"] += len(prompts)
    try:
        answers = server.engine.call(
            "completion", prompts=prompts, n=body.get("n", 1), longest=longest, seed=body.get("seed") or 0,
            temperature=1.0 if temperature is None else temperature, top=body.get("logprobs") or 0,
            prompt_top=body.get("prompt_logprobs"),
        )  # fmt: skip
    finally:
        server.totals["vllm:num_requests_running"] -= len(prompts)
    choices = [
        choice(body, prompt, of_prompt, one)
        for prompt, (of_prompt, made) in zip(prompts, answers, strict=True)
        for one in made
    ]
    for index, one in enumerate(choices):
        one["index"] = index
    used = sum(map(len, prompts))
    generated = sum(len(one.tokens) for _, made in answers for one in made)
    server.totals["vllm:prompt_tokens_total"] += used
    server.totals["vllm:generation_tokens_total"] += generated
    return {
        "id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()),
        "model": server.options.served_model_name or server.options.model, "choices": choices,
        "usage": {"prompt_tokens": used, "completion_tokens": generated, "total_tokens": used + generated},
    }  # fmt: skip


def choice(body: dict[str, Any], prompt: list[int], of_prompt: Any, made: Any) -> dict[str, Any]:
    """Return one completion in the form of the route."""
    names = [f"token_id:{token}" for token in made.tokens]
    logprobs = {
        "text_offset": [0] * len(names),  # there is no text
        "tokens": names,
        "token_logprobs": [values[token] for token, values in zip(made.tokens, made.logprobs, strict=True)],
        "top_logprobs": [
            {f"token_id:{token}": value for token, value in values.items()} for values in made.logprobs
        ],
    }
    prompt_logprobs = of_prompt and [
        values and {
            str(token): {
                "logprob": value, "rank": rank, "decoded_token": None,
            }
            for token, (value, rank) in values.items()
        }
        for values in of_prompt
    ]  # fmt: skip
    ids = body.get("return_token_ids")
    return {
        "text": "", "logprobs": logprobs if body.get("logprobs") is not None else None,
        "finish_reason": made.finish_reason, "stop_reason": None, "prompt_logprobs": prompt_logprobs,
        "prompt_token_ids": prompt if ids else None, "token_ids": made.tokens if ids else None,
    }  # fmt: skip


def finish_weight_update(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    """End a sync, with a name for it if the trainer gives one."""
    server.engine.call("finish", weight_version=body.get("weight_version"))
    return {"message": "Weight update finished"}


def update_weight_version(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    """Name the weights."""
    server.engine.call("set_version", new_version=body["new_version"])
    return {"success": True, "new_version": body["new_version"]}


def call(name: str, message: dict[str, Any], argument: str = "", **fixed: Any) -> Any:
    """Return a route that asks the engine and answers with a message.

    Args:
        argument: name of the object in the request that is passed on; all of it for "*".
    """

    def route(server: Server, body: dict[str, Any]) -> dict[str, Any]:
        passed = {} if not argument else body if argument == "*" else body[argument]
        server.engine.call(name, **({argument: passed} if argument == "init_info" else passed), **fixed)
        return message

    return route


def ask(name: str, field: str) -> Any:
    """Return a route that answers with a value of the engine."""
    return lambda server, body: {field: server.engine.call(name)}


METRICS = {
    "vllm:num_requests_running": "gauge", "vllm:num_requests_waiting": "gauge",
    "vllm:prompt_tokens_total": "counter", "vllm:generation_tokens_total": "counter",
}  # fmt: skip
NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1.0,), "top_p": (1.0,), "top_k": (0, -1), "min_p": (0.0,), "stream": (False,),
    "echo": (False,), "structured_outputs": (), "stop": ([],), "logit_bias": (), "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,), "min_tokens": (0,), "ignore_eos": (False,), "stop_token_ids": ([],),
}  # fmt: skip
"""Parameters of a completion, and the values of them that change nothing."""
ROUTES: dict[tuple[str, str], Any] = {
    ("GET", "/health"): health,
    ("GET", "/version"): lambda server, body: {"version": "0.31.0"},
    ("GET", "/v1/models"): models,
    ("GET", "/metrics"): metrics,
    ("POST", "/v1/completions"): completions,
    ("GET", "/server_info"): server_info,
    ("GET", "/get_world_size"): lambda server, body: {"world_size": 1},
    ("GET", "/is_paused"): ask("is_paused", "is_paused"),
    ("GET", "/weight_info"): ask("version", "weight_version"),
    ("POST", "/pause"): call("pause", {"status": "paused"}, paused=True),
    ("POST", "/resume"): call("pause", {"status": "resumed"}, paused=False),
    ("POST", "/init_weight_transfer_engine"): call(
        "init", {"message": "Weight transfer initialized"}, "init_info"
    ),
    ("POST", "/start_weight_update"): call("start", {"message": "Weight update started"}),
    ("POST", "/update_weights"): call("update", {"message": "Weights updated"}, "update_info"),
    ("POST", "/finish_weight_update"): finish_weight_update,
    ("POST", "/update_weight_version"): update_weight_version,
    ("POST", "/reset_prefix_cache"): ask("reset", "success"),
    ("POST", "/stand_in"): call("plant", {}, "*"),
    ("GET", "/stand_in"): lambda server, body: server.engine.call("look"),
}
DEVELOPMENT = {path for _, path in ROUTES} - {
    "/health", "/version", "/v1/models", "/metrics", "/v1/completions", "/stand_in",
}  # fmt: skip
"""Routes that vLLM has with VLLM_SERVER_DEV_MODE=1 only; here they are missing if it is 0."""


def main() -> None:
    """Serve until a signal, or until the engine has died."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--served-model-name")
    parser.add_argument("--weight-transfer-config", default='{"backend": "nccl"}')
    parser.add_argument("--logprobs-mode", default="processed_logprobs")
    words = sys.argv[1:]
    options, _ = parser.parse_known_args(words[1:] if words[:1] == ["serve"] else words)
    plants = from_environment()
    server = Server(options, plants)
    ends = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ends.set())
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"INFO: Uvicorn running on http://{options.host}:{server.server_address[1]}", flush=True)
    while not ends.wait(0.05):
        if server.engine.dead.is_set():
            print("ERROR: EngineCore encountered an issue; the server ends", flush=True)
            ends.wait(plants.leaves_seconds)
            break
    server.engine.process.kill()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
