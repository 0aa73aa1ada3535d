"""`grpo.py` with completions of a vLLM server, which the tests' stand-in is.

If there is no package `vllm`, its stand-in is put into the path here, when the preloaded libraries have been
checked: with `PYTHONPATH` a warm launch would start fresh interpreters, since TRL has looked for it in vain.
The server is where TRL looks for it by default, or where the environment says: `TEST_ROLLOUT_SERVER` is its
URL, `TEST_ROLLOUT_GROUP_PORT` the port of the weight update group. Writes `weights.sha256`, and to
`synced.txt` the digest of the weights at every step, which are those that the server got.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import tiny
from transformers import TrainerCallback

if importlib.util.find_spec("vllm") is None:
    sys.path.append(str(Path(__file__).resolve().parents[1] / "support" / "rollout_server" / "packages"))
from vllm import cpu_communicator

SETTINGS = {"TEST_ROLLOUT_SERVER": "vllm_server_base_url", "TEST_ROLLOUT_GROUP_PORT": "vllm_group_port"}


class RecordWeights(TrainerCallback):
    """Appends the digest of the weights that a step begins with to a file."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.is_world_process_zero:
            with open(os.path.join(args.output_dir, "synced.txt"), "a") as file:
                file.write(f"{state.global_step} {tiny.digest(dict(model.named_parameters()))}\n")


def main() -> None:
    parser = tiny.rollout_parser(__doc__)
    parser.set_defaults(learning_rate=1e-2, logging_steps=1)
    arguments = parser.parse_args()
    cpu_communicator.install()
    given: dict[str, Any] = {
        setting: os.environ[name] for name, setting in SETTINGS.items() if name in os.environ
    }
    if "vllm_group_port" in given:
        given["vllm_group_port"] = int(given["vllm_group_port"])
    trainer = tiny.rollout_trainer(
        arguments, settings={"use_vllm": True, "vllm_mode": "server", **given, **arguments.settings}
    )
    trainer.add_callback(RecordWeights())
    os.makedirs(arguments.output_dir, exist_ok=True)
    tiny.train(trainer, arguments)
    tiny.write_digest(trainer, arguments.output_dir)


if __name__ == "__main__":
    main()
