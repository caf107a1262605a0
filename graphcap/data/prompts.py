"""Files of conversations → prompts to decode: token ids as a target is asked to go on, with all that is passed over counted.

Called by layout.py and eval.py.
"""

from collections import Counter
from collections.abc import Sequence

from graphcap.data.conversations import prompt_of, read_conversations
from graphcap.data.forms import Conversation
from graphcap.data.sources import BadLine
from graphcap.data.templates import BadConversation
from graphcap.errors import DataError

NO_QUESTION = "in which the assistant speaks first"


def load_prompts(
    paths: Sequence[str], tokenizer, *, count: int, on_bad_line: str, max_length: int, dropped: Counter
) -> list[list[int]]:
    """Token ids of the first `count` conversations up to the first assistant turn, as the template asks a target to go on; of a
    tokenised row up to its first supervised token.

    max_length: tokens of the longest prompt. dropped: gets what is passed over, by reason.
    Raises: DataError if the files hold no prompt, or with on_bad_line "error" naming the place of a row that cannot be used.
    """
    prompts = []
    for conversation in read_conversations(paths, on_bad_line=on_bad_line, dropped=dropped):
        try:
            prompt = prompt_of(conversation, tokenizer)
            if len(prompt) > max_length:
                raise _too_long(conversation, len(prompt), max_length)
        except BadConversation as error:
            if on_bad_line == "error":
                raise
            dropped[error.reason] += 1
            continue
        if prompt:
            prompts.append(prompt)
        else:
            dropped[NO_QUESTION] += 1
        if len(prompts) == count:
            break
    if not prompts:
        raise DataError(
            "prompts",
            ", ".join(map(str, paths)),
            expected="at least one conversation with a user turn",
            got=f"none ({counted(dropped) or 'no row'})",
            fix="give conversations that begin with a user turn",
        )
    return prompts


def _too_long(conversation: Conversation, num_tokens: int, max_length: int) -> BadLine:
    return BadLine(
        "longer than the target's positions",
        conversation.source,
        conversation.line,
        expected=f"a prompt of at most {max_length} tokens, one less than the target has positions",
        got=f"{num_tokens} tokens",
        fix="leave it out or shorten it; in a run's recipe data.on_bad_line = 'skip' passes over it",
    )


def counted(dropped: Counter) -> str:
    """What was passed over, in words: the most frequent reason first."""
    return "; ".join(f"{number:,} {reason}" for reason, number in dropped.most_common())
