"""A generation loop of your own that augments completions while it generates, with two defects and without
them.

    torchrun --nproc-per-node 2 examples/augmented_generation.py --before         # hangs
    grpo-run launch --nproc-per-node 2 examples/augmented_generation.py --before  # names the lines of both
    ranks grpo-run launch --nproc-per-node 2 examples/augmented_generation.py           # runs to the end

At each delimiter a hint is inserted, and all ranks gather how many they insert. On rank 0 the completions
reach the most hints allowed; on rank 1 greedy decoding repeats three tokens for ever. The model is a table,
and needs no network.
"""

import argparse

import torch
import torch.distributed as dist

from grpo_run.trainers import caps, consensus

END, DELIMITER, HINT = 0, 1, 2
MOST_HINTS = 3
WINDOW, SECONDS = 16, 60.0
NEXT = {
    END: END, DELIMITER: 5, HINT: 5,  # rank 0: delimiter, two words, delimiter, ...
    5: 6, 6: DELIMITER,
    7: 8, 8: 9, 9: 7,  # rank 1: the same three words again and again
}  # fmt: skip


def greedy(model: torch.nn.Embedding, tokens: torch.Tensor) -> torch.Tensor:
    """Return the next token of each row."""
    return model(tokens[:, -1]).argmax(-1)


def hints_of_all_ranks(count: int) -> int:
    """Return how many hints all ranks insert together."""
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor([count]))
    return int(torch.cat(counts).sum())


def generate_before(model: torch.nn.Embedding, tokens: torch.Tensor) -> torch.Tensor:
    """Generate as such loops are often written."""
    hints, done = 0, torch.zeros(len(tokens), dtype=torch.bool)
    while not done.all():  # defect 1: greedy decoding may repeat itself forever, and then this never ends
        following = greedy(model, tokens)
        tokens = torch.cat([tokens, following[:, None]], dim=1)
        done |= following == END
        asked = bool((following == DELIMITER).any())
        hints_of_all_ranks(int(asked))
        if asked:
            hints += 1
            tokens = torch.cat([tokens, torch.full((len(tokens), 1), HINT)], dim=1)
        if hints >= MOST_HINTS:  # defect 2: this rank leaves, and the others wait for it in `all_gather`
            break
    return tokens


def generate(model: torch.nn.Embedding, tokens: torch.Tensor) -> torch.Tensor:
    """Generate until no rank has anything left to do; loops and a deadline end completions."""
    hints, done = 0, torch.zeros(len(tokens), dtype=torch.bool)
    repetition = caps.Repetition(prompt_length=tokens.shape[1], window=WINDOW)
    deadline = caps.Deadline(SECONDS)
    for _ in consensus.while_any(lambda: not done.all() and not deadline.passed()):  # noqa: B023 - the present one
        following = greedy(model, tokens)
        tokens = torch.cat([tokens, following[:, None]], dim=1)
        done = done | (following == END) | repetition(tokens)
        asked = hints < MOST_HINTS and bool((following == DELIMITER).any())
        hints_of_all_ranks(int(asked))
        if asked:
            hints += 1
            tokens = torch.cat([tokens, torch.full((len(tokens), 1), HINT)], dim=1)
    return tokens


def main() -> None:
    """Generate, and take a step with what was generated."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--before", action="store_true", help="generate with the two defects")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    model = torch.nn.Embedding(len(NEXT) + 2, len(NEXT) + 2)
    with torch.no_grad():
        model.weight.zero_()
        for token, following in NEXT.items():
            model.weight[token, following] = 1.0

    prompts = torch.tensor([[DELIMITER], [5]] if dist.get_rank() == 0 else [[7], [8]])
    tokens = (generate_before if arguments.before else generate)(model, prompts)

    rewards = torch.tensor([float(len(set(row.tolist()))) for row in tokens])
    dist.all_reduce(rewards)
    print(f"rank {dist.get_rank()}: {tokens.shape[1]} tokens, rewards {rewards.tolist()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
