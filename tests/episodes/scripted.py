"""An engine that says what it is told to, and environments and a tokenizer to go with it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rlhf_pg.rollout import Completion, Finished, Request, RolloutEngine, SamplingParams

Script = Callable[[Request, int], Sequence[int]]

CHAT = (
    "{% for tool in tools or [] %}{{ tool['function']['name'] }}{% endfor %}"
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<eos>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def letters(merges: Sequence[tuple[str, str]] = ()) -> PreTrainedTokenizerFast:
    """A byte-pair tokenizer of small letters, "?" and "!", with these merges and marks of turns."""
    plain = [*"abcdefghijklmnopqrstuvwxyz?!", *(a + b for a, b in merges)]
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *plain])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    backend.decoder = decoders.Fuse()
    roles = [AddedToken(f"<{role}>", special=True) for role in ("user", "assistant", "tool")]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=roles,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT
    return tokenizer


class ScriptedEngine(RolloutEngine):
    """Says what `script` has for each (request, sample), one completion at a moment.

    A completion that does not end in EOS stopped by length. The log-probability of the token at
    place t of the row is -t/10, so that each can be told from the others.
    """

    def __init__(self, script: Script, eos: int, latest_first: bool = False) -> None:
        self.script, self.eos, self.latest_first = script, eos, latest_first
        self.requests: list[Request] = []

    @contextmanager
    def session(self, params: SamplingParams, seed: int) -> Iterator["ScriptedSession"]:
        yield ScriptedSession(self, params)


class ScriptedSession:
    def __init__(self, engine: ScriptedEngine, params: SamplingParams) -> None:
        self.engine, self.params = engine, params
        self.queue: list[tuple[Request, int]] = []

    def add(self, request: Request) -> None:
        self.engine.requests.append(request)
        self.queue += [(request, sample) for sample in request.samples]

    @property
    def idle(self) -> bool:
        return not self.queue

    def step(self) -> list[Finished]:
        request, sample = self.queue.pop(-1 if self.engine.latest_first else 0)
        limit = self.params.max_tokens if request.max_tokens is None else request.max_tokens
        tokens = list(self.engine.script(request, sample))[:limit]
        places = range(request.position, request.position + len(tokens))
        reason = "stop" if tokens[-1] == self.engine.eos else "length"
        logprobs = [-place / 10 for place in places]
        return [Finished(request, sample, Completion(tokens, logprobs, reason))]


def sayer(
    tokenizer: PreTrainedTokenizerFast, *turns: str | Sequence[int], **options: bool
) -> ScriptedEngine:
    """An engine that says the k-th of `turns` where k stop tokens stand behind the prompt."""

    def script(request: Request, sample: int) -> Sequence[int]:
        row = request.tokens[len(request.tokens) - request.position :]
        turn = turns[sum(token == tokenizer.eos_token_id for token in row)]
        return tokenizer.encode(turn, add_special_tokens=False) if isinstance(turn, str) else turn

    return ScriptedEngine(script, tokenizer.eos_token_id, **options)
