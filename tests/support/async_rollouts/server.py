"""Answers the completions of AsyncGRPO without a model: how long they are depends on the prompt, and how long
they take on their length, so that long ones are late.

    python tests/support/async_rollouts/server.py PORT
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
from collections import Counter

SECONDS_A_TOKEN = 0.004
LONGEST = 60
EOS, LETTER = 1, 13
"""Ids of the tests' tokenizer."""


def length(prompt: str, number: int) -> int:
    """Return the tokens of a prompt's completion, from its how manieth it is."""
    usual = random.Random(prompt).lognormvariate(2.0, 0.8)
    return max(1, min(LONGEST, round(usual * random.Random(f"{prompt} {number}").uniform(0.5, 1.5))))


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: Counter[str]) -> None:
    """Answer one request."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        body = b"{}"
        if "content-length: " in head:
            body = await reader.readexactly(int(head.partition("content-length: ")[2].split()[0]))
        content: dict[str, object] = {"asked": list(asked)}
        if "/v1/completions" in head.split("\r\n")[0]:
            prompt = str(json.loads(body)["prompt"])
            tokens = length(prompt, asked[prompt])
            asked[prompt] += 1
            await asyncio.sleep(tokens * SECONDS_A_TOKEN)
            ids = [LETTER + (at + tokens) % 20 for at in range(tokens - 1)] + [EOS]
            content = {"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": [-1.0] * tokens}}]}
        data = json.dumps(content).encode()
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode())
        writer.write(data)
        await writer.drain()
    writer.close()


async def main(port: int) -> None:
    """Serve until a signal."""
    asked: Counter[str] = Counter()
    server = await asyncio.start_server(
        lambda reader, writer: answer(reader, writer, asked), "127.0.0.1", port
    )
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
