"""`rlhf-pg chat` talks to a model in a terminal; without one, each line of its input is a turn."""

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from peft import PeftModel
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TextStreamer,
)

from rlhf_pg import models
from rlhf_pg.boundary.quoted import visible
from rlhf_pg.cli.options import parser_of
from rlhf_pg.cli.recipes import model_of_run
from rlhf_pg.config.parse import fail
from rlhf_pg.data.chat import TooLong, encode

AGAIN = "/new"


def chat(flags: Sequence[str]) -> None:
    """Load a model and talk to it until the input ends."""
    if not flags or flags[0].startswith("-"):
        fail("chat needs a model: rlhf-pg chat PATH_OR_HUB_ID, or the directory of a run")
    options = parser_of("chat").parse_args(list(flags[1:]))
    path, _ = model_of_run(flags[0])
    on_gpu = torch.cuda.is_available()
    dtype = getattr(torch, options.dtype or ("bfloat16" if on_gpu else "float32"))
    with models.about("model"):
        model = models.load_model(path, dtype, trust_remote_code=options.trust_remote_code)
        tokenizer = models.tokenizer_from_pretrained(
            model.name_or_path, trust_remote_code=options.trust_remote_code
        )
    model = model.to("cuda" if on_gpu else "cpu").eval()
    torch.manual_seed(options.seed)
    try:
        Conversation(model, tokenizer, options).run()
    except KeyboardInterrupt:
        print()
        raise SystemExit(130) from None


class Conversation:
    """A chat with a model: its messages so far, by the tokenizer's chat template.

    A model without one continues each line as it stands, and remembers nothing.

    Args:
        options: of the command (`rlhf_pg.cli.options`).
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: Namespace
    ) -> None:
        # Adapters work inside the base model; peft's `generate` would change the generation config.
        self.model = model.get_base_model() if isinstance(model, PeftModel) else model
        self.tokenizer, self.options = tokenizer, options
        self.is_chat = bool(tokenizer.chat_template)
        self.is_terminal = sys.stdin.isatty()
        self.messages: list[dict[str, str]] = []
        self.stops = models.stop_token_ids(model, tokenizer)
        self.model.generation_config = GenerationConfig()  # nothing of the model's own is added
        if not self.is_chat and options.system_prompt is not None:
            fail("system_prompt is for a chat, and this tokenizer has no chat template")

    def run(self) -> None:
        """Answer every line until the input ends."""
        if self.is_terminal:
            how = f"{AGAIN} begins anew" if self.is_chat else "no chat template: lines go on"
            print(f"({how}; Ctrl-D ends)", file=sys.stderr)
        for line in self._lines():
            if line == AGAIN:
                self.messages = []
            elif line.strip():
                self.answer(line)

    def answer(self, line: str) -> str:
        """Say something to the model, and print what it answers as it comes."""
        self._say("user", line)
        try:
            ids = encode(self.messages if self.is_chat else line, self.tokenizer, most=self._room)
        except TooLong as error:
            self.messages = self.messages[:-1]
            print(f"error: {visible(str(error))}: {AGAIN} begins anew", file=sys.stderr)
            return ""
        prompt = torch.tensor([ids], device=self.model.device)
        with torch.no_grad():
            said = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=self._generation(),
                streamer=SafeStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True),
            )
        text: str = self.tokenizer.decode(said[0, len(ids) :], skip_special_tokens=True)
        self._say("assistant", text)
        return text

    def _lines(self) -> Iterator[str]:
        if not self.is_terminal:
            yield from (line.rstrip("\r\n") for line in sys.stdin)
            return
        while True:
            try:
                yield input("> ")
            except EOFError:
                print()
                return

    def _say(self, role: str, text: str) -> None:
        if not self.messages and self.options.system_prompt is not None:
            self.messages.append({"role": "system", "content": self.options.system_prompt})
        self.messages.append({"role": role, "content": text})

    @property
    def _room(self) -> int | None:
        """The most tokens that a prompt may have, so that an answer still fits."""
        positions = models.max_positions(self.model)
        return None if positions is None else max(1, positions - self._longest)

    @property
    def _longest(self) -> int:
        """The most tokens of an answer, which leaves half of the model's positions to the chat."""
        longest: int = self.options.max_completion_length
        positions = models.max_positions(self.model)
        return longest if positions is None else min(longest, max(1, positions // 2))

    def _generation(self) -> GenerationConfig:
        """Return the sampling options of the command."""
        options, pad = self.options, self.tokenizer.pad_token_id
        how: dict[str, Any] = {"do_sample": False}
        if options.temperature > 0:
            how = {"do_sample": True, "temperature": options.temperature}
            how |= {"top_p": options.top_p, "top_k": options.top_k}
        return GenerationConfig(
            **how,
            max_new_tokens=self._longest,
            eos_token_id=self.stops,
            pad_token_id=self.stops[0] if pad is None else pad,
        )


class SafeStreamer(TextStreamer):  # type: ignore[misc]
    """A streamer that shows control characters of the model as text, so that none is obeyed."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print the words that are complete."""
        shown = visible(text.expandtabs(4))
        print(shown, end="\n" if stream_end else "", flush=True)
