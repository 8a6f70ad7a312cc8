"""A process reward model (Lightman et al. 2023) as a reward: it scores the steps of a completion,
which `process_group_normalized` credits to the tokens before them.

    python examples/process_reward.py PATH_OR_HUB_ID --config recipes/gsm8k_grpo.yaml

The model is a token classifier with one output, or two as the `PRMTrainer` of TRL leaves it.
"""

import sys
from statistics import fmean

import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer

from rlhf_pg import GRPOConfig, GRPOTrainer
from rlhf_pg.config import parse
from rlhf_pg.data.batch import pad_rows
from rlhf_pg.data.chat import encode
from rlhf_pg.data.micro_batches import RowLengths, split_padded
from rlhf_pg.models.attention import max_positions
from rlhf_pg.models.loading import from_pretrained
from rlhf_pg.rewards.reward_model import SCORING_TOKENS

HALF = "\N{REPLACEMENT CHARACTER}"  # decoded from an incomplete character
MOST = 4  # most tokens of one character, byte by byte


class ProcessReward:
    """A scorer of the steps of a turn: texts between two separators that are not blank.

    The model reads the prompt, and each step followed by the separator, tokenised apart, as the
    `PRMTrainer` trains it. Its score of a step, at the last token of the separator, is the
    probability of label 1 of two, or its only output. In the completion the score stands at the
    policy's token that completes the separator or ends the completion. If one token completes
    several steps, their mean stands there: `process_group_normalized` compares it with scores of
    single steps, which a sum would exceed.
    """

    def __init__(self, model, tokenizer, policy_tokenizer=None, separator="\n"):
        if model.config.num_labels not in (1, 2):
            raise ValueError(f"num_labels must be 1 or 2, got {model.config.num_labels}")
        self.model, self.tokenizer, self.separator = model.eval(), tokenizer, separator
        self.policy_tokenizer = policy_tokenizer or tokenizer

    @torch.no_grad()
    def __call__(self, prompts, completions, completion_ids, **columns):
        """A score for each step, at its last token, and None for the other tokens."""
        rows, judged = [], []  # token ids, and where in them the steps are judged
        steps = [self.steps(ids) for ids in completion_ids]
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            if not isinstance(completion, str) and len(completion) != 1:
                raise ValueError("the steps of several messages are not told apart: use no tools")
            ids, ends = encode(prompt, self.tokenizer, i), []
            for step, _ in steps[i]:
                for part in (step, self.separator):
                    ids += self.tokenizer.encode(part, add_special_tokens=False)
                ends.append(len(ids) - 1)
            if len(ids) > (max_positions(self.model) or len(ids)):
                raise ValueError(f"row {i} has {len(ids)} tokens, beyond max_position_embeddings")
            rows.append(ids)
            judged.append(ends)
        scores = [[None] * len(ids) for ids in completion_ids]
        for batch in split_padded([RowLengths(0, 0, len(ids)) for ids in rows], SCORING_TOKENS):
            tokens, mask = (x.to(self.model.device) for x in pad_rows([rows[i] for i in batch], 0))
            logits = self.model(input_ids=tokens, attention_mask=mask.long()).logits.float()
            said = logits[..., 0] if logits.shape[-1] == 1 else logits.softmax(-1)[..., 1]
            for i, by_token in zip(batch, said, strict=True):
                at_token = {}
                for (_, t), score in zip(steps[i], by_token[judged[i]].tolist(), strict=True):
                    at_token.setdefault(t, []).append(score)
                for t, several in at_token.items():
                    scores[i][t] = fmean(several)
        return scores

    def steps(self, ids):
        """The steps of a completion, and the place of the token that ends each.

        Each token is decoded together with those right before it, on which its text depends: the
        blank before a word, or the first bytes of a character.
        """

        def decode(start, end):
            return self.policy_tokenizer.decode(ids[start:end], skip_special_tokens=True)

        text, through, start, read = "", [], 0, 0
        for t in range(len(ids)):
            new = decode(start, t + 1)[len(decode(start, read)) :]
            through += [t] * ((text + new).count(self.separator) - len(through))
            if not new.endswith(HALF) or t - read + 1 == MOST or t + 1 == len(ids):
                text, start, read = text + new, read, t + 1
        steps = [*zip(text.split(self.separator), [*through, len(ids) - 1], strict=True)]
        return [step for step in steps if step[0].strip()] or steps[-1:]


def new_trainer(path, flags):
    """A trainer that is paid by the classifier at a path, whose steps its own tokenizer reads."""
    kind = AutoModelForTokenClassification
    classifier = from_pretrained(kind, path, dtype="auto", trust_remote_code=False)
    reward = ProcessReward(classifier, AutoTokenizer.from_pretrained(path))
    args = parse(GRPOConfig, ["--advantage_estimator", "process_group_normalized", *flags])
    trainer = GRPOTrainer(args=args, reward_funcs=reward)
    reward.policy_tokenizer = trainer.processing_class
    classifier.to(trainer.runtime.device)
    return trainer


if __name__ == "__main__":
    new_trainer(sys.argv[1], sys.argv[2:]).train()
