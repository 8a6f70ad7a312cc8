"""Players: from prompts to groups of rows, by one completion or by an episode for each row."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_pg.data.chat import text_of_completion, whole_turn
from rlhf_pg.data.prompts import Prompt
from rlhf_pg.data.rows import Row
from rlhf_pg.rollout.engine import Completion, RolloutEngine, SamplingParams
from rlhf_pg.runtime import Runtime


@dataclass(frozen=True, kw_only=True)
class Player(ABC):
    """Makes the rows of prompts, with the settings of a run."""

    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: Sequence[int]  # each of them ends a turn
    skip_special_tokens: bool = True  # in the text that rewards see

    @abstractmethod
    def play(
        self,
        engine: RolloutEngine,
        prompts: Sequence[Prompt],
        n: int,
        params: SamplingParams,
        seed: int,
    ) -> Generator[list[Row]]:
        """Yield the group of each prompt, its `n` rows, as soon as the last of them has ended.

        A caller that stops early must close the generator, which holds a session open. The noise of
        a token depends only on (seed, prompt index, sample, position after the prompt).
        """

    def metrics(self, rows: Sequence[Row], runtime: Runtime) -> dict[str, float]:
        """Compute metrics of the rows of all processes; collective."""
        return {}

    def texts(self, prompt: Any, ids: Sequence[int]) -> tuple[Any, Any]:
        """Return a prompt and its completion of one turn, both as text or both as messages."""
        text = text_of_completion(
            ids,
            self.tokenizer,
            self.skip_special_tokens,
            self.stop_token_ids,
        )
        if isinstance(prompt, str):
            return prompt, text
        return whole_turn(prompt, [{"role": "assistant", "content": text}])


class CompletionPlayer(Player):
    """Samples one completion for each row."""

    def play(
        self,
        engine: RolloutEngine,
        prompts: Sequence[Prompt],
        n: int,
        params: SamplingParams,
        seed: int,
    ) -> Generator[list[Row]]:
        tokens = [prompt.ids for prompt in prompts]
        indices = [prompt.index for prompt in prompts]
        rows: list[dict[int, Row]] = [{} for _ in prompts]
        with closing(engine.stream(tokens, n, params, seed, indices)) as stream:
            for number, completion in stream:
                prompt_number, sample = divmod(number, n)
                rows[prompt_number][sample] = self._row(prompts[prompt_number], completion)
                if len(rows[prompt_number]) == n:
                    yield [rows[prompt_number][k] for k in range(n)]

    def _row(self, prompt: Prompt, completion: Completion) -> Row:
        opened, answer = self.texts(prompt.opening(), completion.tokens)
        return Row(
            prompt_ids=prompt.ids,
            ids=completion.tokens,
            logprobs=completion.logprobs,
            truncated=completion.finish_reason == "length",
            group=prompt.index,
            dataset_row=prompt.dataset_row,
            prompt=opened,
            completion=answer,
            columns=prompt.columns(),
        )
