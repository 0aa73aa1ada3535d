"""Measure what the comparison of replicas costs a step: digests of parameters and moments, on one rank.

One process computes training steps and digests in turns, so that a drift of the machine affects both alike.
The share is that of the digests in `--every` steps. Not measured: the vote on one number, which is one of
`benchmarks/consensus.py`.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent))

from parts import machine
from parts.interval import median_interval

from grpo_run.runtime.features.replicas._digests import tensors_in_common
from grpo_run.runtime.rank.tensor_digests import digests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--every", type=int, default=50, help="steps between two comparisons")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128, help="of a sample")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = Qwen2Config(
        vocab_size=32_000, hidden_size=arguments.width, intermediate_size=4 * arguments.width,
        num_hidden_layers=arguments.layers, num_attention_heads=8, num_key_value_heads=4,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(32_000, (arguments.samples, arguments.tokens), device=device)

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def compare() -> None:
        digests([tensor for _, tensor in tensors_in_common([model], [optimizer])])

    def seconds(what: object) -> float:
        assert callable(what)
        begun = time.perf_counter()
        what()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    step()
    compare()
    pairs = [(seconds(step), seconds(compare)) for _ in range(arguments.rounds)]
    share = median_interval([100 * digest / (arguments.every * of_step) for of_step, digest in pairs])
    interval = "" if share.low is None else f" [{share.low:.2f}, {share.high:.2f}]"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(machine.sentence(machine.facts()))
    print(f"{parameters / 1e6:.0f} M parameters, {arguments.samples} x {arguments.tokens} tokens a step")
    print(f"digests every {arguments.every} steps: {share.median:.2f} %{interval} of the time of the steps")


if __name__ == "__main__":
    main()
