"""`rlhf-pg chat`: talk to a model in a terminal, or pipe in a turn per line."""

import sys
from collections.abc import Sequence

import torch
from peft import PeftModel
from transformers import GenerationConfig, TextStreamer

from rlhf_pg.boundary.quoted import about, visible
from rlhf_pg.cli.options import parser_of
from rlhf_pg.cli.recipes import model_of_run
from rlhf_pg.config.parse import fail, load
from rlhf_pg.data.chat import encode
from rlhf_pg.models.attention import max_positions
from rlhf_pg.models.loading import load_model, stop_token_ids, tokenizer_from_pretrained

AGAIN = "/new"


def chat(flags: Sequence[str]) -> None:
    """Load a model, and answer every line until the input ends; without a chat template the model
    continues each line by itself.
    """
    options = parser_of("chat").parse_args(flags)
    on_gpu = torch.cuda.is_available()
    dtype = getattr(torch, options.dtype or ("bfloat16" if on_gpu else "float32"))
    trust = {"trust_remote_code": options.trust_remote_code}
    path, recipe = model_of_run(options.model)
    with about("model"):
        loaded = load_model(path, dtype, **trust)
        tokenizer = tokenizer_from_pretrained(loaded.name_or_path, **trust)
    system_prompt = options.system_prompt
    if system_prompt is None and recipe is not None and tokenizer.chat_template:
        system_prompt = load(recipe).get("system_prompt")  # the run's own
    if not tokenizer.chat_template and system_prompt is not None:
        fail("system_prompt is for a chat, but this tokenizer has no chat template")
    stops = stop_token_ids(loaded, tokenizer)
    # The base model includes the adapter; peft's `generate` would change the generation config.
    model = loaded.get_base_model() if isinstance(loaded, PeftModel) else loaded
    model.to("cuda" if on_gpu else "cpu").eval()
    model.generation_config = GenerationConfig()  # without the model's own settings
    torch.manual_seed(options.seed)

    # An answer leaves half of the model's positions to the chat.
    positions = max_positions(model) or sys.maxsize
    longest = min(options.max_completion_length, max(1, positions // 2))
    pad = stops[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    generation = GenerationConfig(max_new_tokens=longest, eos_token_id=stops, pad_token_id=pad)
    if options.temperature > 0:
        keys = ("temperature", "top_p", "top_k")
        generation.update(do_sample=True, **{key: getattr(options, key) for key in keys})
    began = []
    if system_prompt is not None:
        began = [{"role": "system", "content": system_prompt}]
    messages = began
    if prompt := "> " if sys.stdin.isatty() else "":
        print(f"({AGAIN} begins anew; Ctrl-D ends)", file=sys.stderr)
    while True:
        try:
            line = input(prompt)
        except EOFError:
            break
        messages = began if line == AGAIN else messages
        if line == AGAIN or not line.strip():
            continue
        asked = [*messages, {"role": "user", "content": line}]
        try:
            ids = encode(asked if tokenizer.chat_template else line, tokenizer)
            if len(ids) + longest > positions:
                said = f"{len(ids)} tokens of chat and {longest} for an answer"
                raise ValueError(f"{said} are beyond the model's context of {positions}")
        except ValueError as error:
            print(f"error: {visible(str(error))}: {AGAIN} begins anew", file=sys.stderr)
            continue
        given = torch.tensor([ids], device=model.device)
        made = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            generation_config=generation,
            streamer=SafeStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        )
        answer = tokenizer.decode(made[0, len(ids) :], skip_special_tokens=True)
        messages = [*asked, {"role": "assistant", "content": answer}]
    if prompt:
        print()  # behind Ctrl-D


class SafeStreamer(TextStreamer):  # type: ignore[misc]
    """A streamer that escapes control characters, so that the terminal does not obey them."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print the words that are complete."""
        print(visible(text.expandtabs(4)), end="\n" if stream_end else "", flush=True)
