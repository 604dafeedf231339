"""The token by which a chat template ends an answer, found by rendering one."""

from collections.abc import Callable
from typing import Any

from realizar_torch.errors import RealizarError

# Messages for a look at what a template puts behind an answer.
_QUESTION, _ANSWER = "What is the question?", "This is the answer."


def find_turn_end(tokenizer: Any, is_control: Callable[[int], bool]) -> tuple[int, ...]:
    """The control token behind an answer, unless one of ``tokenizer.eos_token_ids`` is there; else ().

    Not every file names it: a template may end answers by a token of its own, or only by the next turn's
    beginning. Empty without a template.
    """
    question, answer = {"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}
    for messages in ([question, answer], [question, answer, question]):
        try:
            chat = tokenizer.apply_chat_template(messages, add_generation_prompt=False, tokenize=False)
        except RealizarError:
            continue
        following = str(chat).partition(_ANSWER)[2].partition(_QUESTION)[0]
        ids = tokenizer.encode(following, add_special_tokens=False, parse_special=True)
        control = [token for token in ids if is_control(token)]
        if control:
            return () if set(control) & set(tokenizer.eos_token_ids) else (control[0],)
    return ()
