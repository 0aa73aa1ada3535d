"""What proves which weights a server holds, asked and kept by rank 0.

Three kinds of evidence, each of which a server may lack:

- the version: a name that the server is told after each sending, and says again. One that was started again
  says another.
- the fingerprint: the log-probabilities of one fixed prompt. A server that is repeatable gives the same until
  it is sent other weights, and never the same for two different ones. It finds a server that goes on with old
  weights, although it says the new version.
- the difference between the log-probabilities of the samples in the server and in the trainer, which GRPO
  computes: judged by the run's own median.

`Digest` tells different weights from equal ones without keeping them. Does not send weights, and decides
nothing for other ranks. Called by `_custody.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from requests.exceptions import RequestException

from grpo_run.runtime.features.rollout_server._limits import unlimited
from grpo_run.watchdog.text import TextEnum

PROMPT = tuple(range(3, 11))
"""Tokens that any vocabulary has."""
ASK_SECONDS = 60.0
"""For a request of our own. A server that does not answer it says nothing; the trainer's requests decide."""
TRIES = 3
"""A fingerprint must differ so often to count: other requests may share the server's batch."""
MOST_FINGERPRINTS = 64
WINDOW = 20
LEAST_DIFFERENCES = 5
"""So many rollouts make a baseline."""
FACTOR, MARGIN = 5.0, 1e-3
"""Between rollouts of healthy runs the mean difference varies by half; of a server with the trainer's own
arithmetic it is nearly 0, and the margin counts."""


INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By their size in bytes."""


class Kind(TextEnum):
    """Kinds of evidence."""

    version = "version"
    fingerprint = "fingerprint"
    difference = "log-probabilities"


@dataclass(frozen=True, kw_only=True)
class Doubt:
    """Why a rollout is not, or will not be, of the weights that were sent last, as a clause."""

    kind: Kind
    text: str


class Digest:
    """A digest of named tensors, in the order in which they are sent: the sum of the bits of each, as
    integers, on its own device, and nothing waits for it before the end.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._sums: list[torch.Tensor] = []

    def over(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass tensors on, and add each."""
        for name, tensor in tensors:
            bits = tensor.detach().view(INTEGERS[tensor.element_size()])
            self._names.append(name)
            self._sums.append(bits.sum(dtype=torch.int64))
            yield name, tensor

    def text(self) -> str:
        """Return the digest of the tensors so far, as hexadecimal digits; "" of none."""
        if not self._sums:
            return ""
        sums = torch.stack([one.to(self._sums[0].device) for one in self._sums]).tolist()
        return hashlib.blake2b(json.dumps([self._names, sums]).encode(), digest_size=8).hexdigest()


@dataclass
class Differences:
    """The baseline of the differences between server and trainer: of the last rollouts that were accepted."""

    accepted: list[float] = field(default_factory=list)

    @property
    def known(self) -> bool:
        """Whether there is a baseline."""
        return len(self.accepted) >= LEAST_DIFFERENCES

    def doubt(self, value: float) -> Doubt | None:
        """Judge the mean difference of a rollout; NaN if there is none."""
        if not self.known:
            return None
        usual = median(self.accepted)
        if not value > max(FACTOR * usual, usual + MARGIN):
            return None
        return Doubt(
            kind=Kind.difference,
            text=f"the log-probabilities of its samples differ by {value:.2g} from the trainer's, usual is"
            f" {usual:.2g}",
        )

    def accept(self, value: float) -> None:
        """Add a rollout that is trained on."""
        self.accepted = [*self.accepted, value][-WINDOW:]


class HeldWeights:
    """The weights that a server has been sent, and what it says of them. On rank 0.

    Args:
        client: TRL's.
        note: called with what a user may want to know.
    """

    def __init__(self, client: Any, note: Callable[[str], None]) -> None:
        self._client = client
        self._note = note
        self._version = ""
        self._fingerprint = ""
        self._repeatable: bool | None = None
        self._replayed = False
        self.known: dict[str, str] = {}
        """Digests of weights by the fingerprint that they gave."""
        self.ignored: set[Kind] = set()
        """Evidence that this server has been found not to give."""

    def sent(self, version: str, digest: str) -> None:
        """Note that weights were sent: give them a name, and take their fingerprint.

        Args:
            digest: "" if it is not known.
        """
        told = self._ask("POST", "/update_weight_version", {"new_version": version})
        self._version = version if told is not None else ""
        self._fingerprint = self._ask_fingerprint() if self._repeatable is not False else ""
        if self._repeatable is None and self._fingerprint:
            self._repeatable = self._ask_fingerprint() == self._fingerprint
            if not self._repeatable:
                self._fingerprint = ""
                self._note("the rollout server gives one prompt different log-probabilities: no fingerprints")
        if self._fingerprint and digest:
            self._replayed = self.known.setdefault(self._fingerprint, digest) != digest
            if len(self.known) > MOST_FINGERPRINTS:
                del self.known[list(self.known)[1]]  # a server that begins anew answers like the first

    def forget(self) -> None:
        """Note that the server is to be sent weights, whatever it holds."""
        self._version = self._fingerprint = ""

    @property
    def given(self) -> list[Kind]:
        """The evidence that vouches for the weights, apart from differences."""
        given = {Kind.version: self._version, Kind.fingerprint: self._fingerprint}
        return [kind for kind, value in given.items() if value and kind not in self.ignored]

    def lost(self) -> bool:
        """Whether the server says another version than it was told; False before the first sending."""
        if Kind.version not in self.given:
            return False
        answer = self._ask("GET", "/weight_info")
        held = answer.get("weight_version") if isinstance(answer, Mapping) else None
        return held is not None and held != self._version

    def doubt(self, *, generated: bool = True) -> Doubt | None:
        """Ask whether it still holds what was sent last.

        Args:
            generated: it has generated since; otherwise its fingerprint, which may take as long as a token of
                a busy server, is left for then.
        """
        if self.lost():
            text = "the server does not know their version: it was started again, or sent other weights"
            return Doubt(kind=Kind.version, text=text)
        if Kind.fingerprint not in self.given:
            return None
        if self._replayed:
            text = "the server answers as it did with other weights, which it was sent before"
            return Doubt(kind=Kind.fingerprint, text=text)
        if not generated or any(self._ask_fingerprint() in (self._fingerprint, "") for _ in range(TRIES)):
            return None
        text = "the server answers otherwise than after the last weights were sent"
        return Doubt(kind=Kind.fingerprint, text=text)

    def _ask_fingerprint(self) -> str:
        """Return a digest of the log-probabilities of the prompt, "" if the server does not give them."""
        answer = self._ask(
            "POST",
            "/v1/completions",
            {
                "model": self._client.model, "prompt": list(PROMPT), "max_tokens": 1, "temperature": 0,
                "logprobs": 1, "prompt_logprobs": 1, "return_tokens_as_token_ids": True, "seed": 0,
            },
        )  # fmt: skip
        try:
            choice = answer["choices"][0]
            values = [choice["logprobs"]["top_logprobs"], choice["prompt_logprobs"]]
        except (TypeError, LookupError):
            return ""
        return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=8).hexdigest()

    def _ask(self, method: str, route: str, body: Any = None) -> Any:
        """Return the answer of the server; None if it has none."""
        request = unlimited(self._client.session)
        try:
            answer = request(method, f"{self._client.base_url}{route}", json=body, timeout=ASK_SECONDS)
            return answer.json() if answer.status_code == 200 else None
        except (RequestException, ValueError):
            return None
