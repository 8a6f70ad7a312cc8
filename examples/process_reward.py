"""A process reward model (Lightman et al. 2023) as a reward: it scores the steps of a completion,
which `process_group_normalized` credits to the tokens before them.

    python examples/process_reward.py PATH_OR_HUB_ID --task arithmetic --max_completion_length 64

The model is a token classifier with one output, as the `PRMTrainer` of TRL leaves it, or two.
"""

import sys
from statistics import fmean

import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer

from rlhf_pg import GRPOConfig, GRPOTrainer
from rlhf_pg.config import parse
from rlhf_pg.data.batch import pad_rows
from rlhf_pg.data.chat import encode

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
        self.model, self.tokenizer, self.separator = model.eval(), tokenizer, separator
        self.policy_tokenizer = policy_tokenizer or tokenizer

    @torch.no_grad()
    def __call__(self, prompts, completions, completion_ids, **columns):
        """A score for each step, at its last token, and None for the other tokens."""
        rows, judged = [], []  # token ids, and where in them the steps are judged
        steps = [self.steps(ids) for ids in completion_ids]
        for i, prompt in enumerate(prompts):
            ids, ends = encode(prompt, self.tokenizer, i), []
            for step, _ in steps[i]:
                for part in (step, self.separator):
                    ids += self.tokenizer.encode(part, add_special_tokens=False)
                ends.append(len(ids) - 1)
            rows.append(ids)
            judged.append(ends)
        tokens, mask = (x.to(self.model.device) for x in pad_rows(rows, 0))
        logits = self.model(input_ids=tokens, attention_mask=mask.long()).logits.float()
        said = logits[..., 0] if logits.shape[-1] == 1 else logits.softmax(-1)[..., 1]
        scores = [[None] * len(ids) for ids in completion_ids]
        for i, ends in enumerate(judged):
            at_token = {}
            for (_, t), score in zip(steps[i], said[i, ends].tolist(), strict=True):
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


if __name__ == "__main__":
    path, flags = sys.argv[1], ["--advantage_estimator", "process_group_normalized", *sys.argv[2:]]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    classifier = AutoModelForTokenClassification.from_pretrained(path).to(device)
    reward = ProcessReward(classifier, AutoTokenizer.from_pretrained(path))
    GRPOTrainer(args=parse(GRPOConfig, flags), reward_funcs=reward).train()
