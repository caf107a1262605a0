"""Ordinary-looking conversations of a given size, to measure how texts are read: the same file from the same arguments.

    python tools/make_text.py OUT.jsonl MEGABYTES [--seed 0]

Words are drawn from the tiny target's conversations, one in forty from 200,000 made-up ones; a conversation has one to three
turns and about 520 words (log-normal, sigma 0.7). It calls nothing of graphcap.
"""

import argparse
import json
import math
import random
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "graphcap" / "assets" / "tiny" / "conversations" / "train.jsonl"
RARE = 0.025
ENDS = (".\n\n", "\n", ":\n- ", "\n\n")


def conversation(draw: random.Random, common: list[str], rare: list[str]) -> dict:
    """One row: messages of user and assistant."""
    turns = draw.choice((1, 1, 2, 2, 3))
    num_words = min(int(draw.lognormvariate(math.log(520), 0.7)), 2800)
    messages = []
    for _ in range(turns):
        question = draw.choices(common, k=draw.randint(8, 40))
        answer = draw.choices(common, k=max(8, num_words // turns - len(question)))
        for words in (question, answer):
            for _ in range(sum(draw.random() < RARE for _ in words)):
                words[draw.randrange(len(words))] = draw.choice(rare)
        for place in range(60, len(answer), draw.randint(50, 120)):
            answer[place] += draw.choice(ENDS)
        messages += [{"role": "user", "content": " ".join(question)}, {"role": "assistant", "content": " ".join(answer)}]
    return {"messages": messages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("megabytes", type=float)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    texts = [json.loads(line)["messages"] for line in SOURCE.read_text(encoding="utf-8").splitlines()]
    common = " ".join(message["content"] for messages in texts for message in messages).split()
    rare = ["".join(draw.choices("etaoinshrdlucmfwypvbgkjqxz", k=draw.randint(4, 12))) for _ in range(200_000)]
    size = 0
    with open(arguments.out, "w", encoding="utf-8") as file:
        while size < arguments.megabytes * 1e6:
            line = json.dumps(conversation(draw, common, rare), ensure_ascii=False) + "\n"
            size += len(line.encode())
            file.write(line)


if __name__ == "__main__":
    main()
