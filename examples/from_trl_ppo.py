"""TRL's script of PPO with the import changed: a reward model scores, the critic starts from it.

    python examples/from_trl_ppo.py --learning_rate 3e-6 --missing_eos_penalty 1.0 --max_steps 100

`--sft_model_path`, `--reward_model_path`, `--dataset` and `--split` take other names; any other
flag is a key of `PPOConfig`. No reference is given, since the trainer keeps the model as it was;
prompts stay text, which the trainer tokenises.
"""

import argparse

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlhf_pg import PPOConfig, PPOTrainer  # from trl import PPOConfig, PPOTrainer
from rlhf_pg.config import parse

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--sft_model_path", default="EleutherAI/pythia-1b-deduped")
parser.add_argument("--reward_model_path", default="EleutherAI/pythia-1b-deduped")
parser.add_argument("--dataset", default="trl-internal-testing/descriptiveness-sentiment-trl-style")
parser.add_argument("--split", default="descriptiveness")
parser.add_argument("--eval_samples", type=int, default=100)
names, flags = parser.parse_known_args()

tokenizer = AutoTokenizer.from_pretrained(names.sft_model_path)
reward_tokenizer = AutoTokenizer.from_pretrained(names.reward_model_path)
for one in (tokenizer, reward_tokenizer):
    if one.pad_token is None:
        one.pad_token = one.eos_token
value_model = AutoModelForSequenceClassification.from_pretrained(
    names.reward_model_path, num_labels=1
)
reward_model = AutoModelForSequenceClassification.from_pretrained(
    names.reward_model_path, num_labels=1
)
policy = AutoModelForCausalLM.from_pretrained(names.sft_model_path)

dataset = load_dataset(names.dataset, split=names.split)
held_out = len(dataset) - names.eval_samples

trainer = PPOTrainer(
    args=parse(PPOConfig, ["--output_dir", "pythia-1b-deduped-ppo", *flags]),
    processing_class=tokenizer,
    model=policy,
    reward_funcs=reward_model,  # reward_model=
    reward_processing_classes=reward_tokenizer,
    value_model=value_model,
    train_dataset=dataset.select(range(held_out)),
    eval_dataset=dataset.select(range(held_out, len(dataset))),
)
trainer.train()
