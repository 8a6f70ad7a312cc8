"""`rlhf-pg chat` talks to a model in a terminal; without one, each line of its input is a turn."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch
from peft import PeftModel
from transformers import GenerationConfig, TextStreamer

from rlhf_pg import models
from rlhf_pg.boundary.quoted import visible
from rlhf_pg.cli.options import parser_of
from rlhf_pg.cli.recipes import model_of_run
from rlhf_pg.config.parse import fail
from rlhf_pg.data.chat import TooLong, encode

AGAIN = "/new"


def chat(flags: Sequence[str]) -> None:
    """Load a model, and answer every line until the input ends.

    A model without a chat template continues each line as it stands, and remembers nothing.
    """
    options = parser_of("chat").parse_args(flags)
    path, _ = model_of_run(options.model)
    on_gpu = torch.cuda.is_available()
    dtype = getattr(torch, options.dtype or ("bfloat16" if on_gpu else "float32"))
    trusted = options.trust_remote_code
    with models.about("model"):
        loaded = models.load_model(path, dtype, trust_remote_code=trusted)
        tokenizer = models.tokenizer_from_pretrained(loaded.name_or_path, trust_remote_code=trusted)
    if not tokenizer.chat_template and options.system_prompt is not None:
        fail("system_prompt is for a chat, and this tokenizer has no chat template")
    stops = models.stop_token_ids(loaded, tokenizer)
    # Adapters work inside the base model; peft's `generate` would change the generation config.
    model = loaded.get_base_model() if isinstance(loaded, PeftModel) else loaded
    model.to("cuda" if on_gpu else "cpu").eval()
    model.generation_config = GenerationConfig()  # nothing of the model's own is added
    torch.manual_seed(options.seed)

    # An answer leaves half of the model's positions to the chat.
    positions, longest = models.max_positions(model), options.max_completion_length
    if positions is not None:
        longest = min(longest, max(1, positions // 2))
    room = None if positions is None else max(1, positions - longest)
    pad = tokenizer.pad_token_id
    generation = GenerationConfig(
        max_new_tokens=longest,
        eos_token_id=stops,
        pad_token_id=stops[0] if pad is None else pad,
    )
    if options.temperature > 0:
        generation.update(
            do_sample=True,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
        )
    began: list[dict[str, str]] = []
    if options.system_prompt is not None:
        began.append({"role": "system", "content": options.system_prompt})
    messages = began
    if sys.stdin.isatty():
        what = f"{AGAIN} begins anew" if tokenizer.chat_template else "no chat template"
        print(f"({what}; Ctrl-D ends)", file=sys.stderr)
    for line in _lines():
        if line == AGAIN:
            messages = began
            continue
        if not line.strip():
            continue
        asked = [*messages, {"role": "user", "content": line}]
        try:
            ids = encode(asked if tokenizer.chat_template else line, tokenizer, most=room)
        except TooLong as error:
            print(f"error: {visible(str(error))}: {AGAIN} begins anew", file=sys.stderr)
            continue
        prompt = torch.tensor([ids], device=model.device)
        with torch.no_grad():
            said = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=generation,
                streamer=SafeStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            )
        answer = tokenizer.decode(said[0, len(ids) :], skip_special_tokens=True)
        messages = [*asked, {"role": "assistant", "content": answer}]


def _lines() -> Iterator[str]:
    prompt = "> " if sys.stdin.isatty() else ""
    with suppress(EOFError):
        while True:
            yield input(prompt)
    if prompt:
        print()  # behind Ctrl-D


class SafeStreamer(TextStreamer):  # type: ignore[misc]
    """A streamer that shows control characters of the model as text, so that none is obeyed."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print the words that are complete."""
        shown = visible(text.expandtabs(4))
        print(shown, end="\n" if stream_end else "", flush=True)
