"""Messages -> tokens: the only file that touches chat templates."""

from typing import Any

from trueline.data.types import Message


class ChatFormat:
    """A tokenizer and the decision whether its chat template is used."""

    def __init__(self, tokenizer: Any, use_template: bool) -> None:
        self.tokenizer = tokenizer
        self.templated = use_template and bool(tokenizer.chat_template)

    def prompt_tokens(self, messages: list[Message]) -> list[int]:
        if self.templated:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        text = "\n".join(message["content"] for message in messages)
        return list(self.tokenizer(text)["input_ids"])

    def completion_tokens(self, text: str) -> list[int]:
        """The tokens of an answer, its end included."""
        tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return [*tokens, self.tokenizer.eos_token_id]

    def reply_text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))
