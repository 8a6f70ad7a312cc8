"""Mistakes in log-probabilities and entropies that are computed without keeping the logits."""

from tests.mutants import Mutant

HEAD = "tests/models/test_head.py"
FINISH = "tests/models/test_finish.py"
FILE = "rlhf_pg/models/head.py"
SOFTMAX = "rlhf_pg/models/softmax.py"
BUDGET = "tests/trainers/test_budget.py"

MUTANTS = [
    Mutant(
        name="weights-gradient-rounded-by-piece",
        mistake="a bfloat16 gradient is rounded whenever a piece is added: 2 percent off at 256",
        file=FILE,
        old="torch.zeros_like(x, dtype=_wide(x)) if needed",
        new="torch.zeros_like(x) if needed",
        killers=(f"{HEAD}::test_many_pieces_round_a_gradient_no_more_than_one",),
    ),
    Mutant(
        name="gradient-of-a-frozen-head",
        mistake="the gradient of a frozen head is summed: a head in float32, for nothing",
        file=FILE,
        old="torch.zeros_like(x, dtype=_wide(x)) if needed",
        new="torch.zeros_like(x, dtype=_wide(x)) if x is not None",
        killers=(f"{HEAD}::test_a_frozen_head_sums_no_gradient",),
    ),
    Mutant(
        name="two-pieces-alive",
        mistake="a piece of the logits' gradient lives until there is the next one",
        file=FILE,
        old="            del gradient  # before there is the next one\n",
        new="",
        killers=(f"{HEAD}::test_memory_is_that_of_one_piece",),
    ),
    Mutant(
        name="head-by-its-weights-alone",
        mistake="what a subclass of the linear layer does, or a wrapper around it, is left out",
        file=FILE,
        old='type(layer).forward is nn.Linear.forward and "forward" not in vars(layer)',
        new="isinstance(layer, nn.Linear)",
        killers=(f"{HEAD}::test_a_layer_with_more_to_it_is_asked_for_its_logits",),
    ),
    Mutant(
        name="hooks-are-shown-no-logits",
        mistake="a hook on the head that changes the logits is given log-probabilities",
        file=FILE,
        old='if has_hooks and not hasattr(weights[0], "ds_id"):',
        new="if False:",
        killers=(f"{HEAD}::test_a_layer_with_more_to_it_is_asked_for_its_logits",),
    ),
    Mutant(
        name="head-stays-replaced",
        mistake="the model's own forward pass gives log-probabilities after the first error",
        file=FILE,
        old="    try:\n        yield\n    finally:\n        del layer.forward\n",
        new="    yield\n    del layer.forward\n",
        killers=(f"{HEAD}::test_the_layer_is_what_it_was",),
    ),
    Mutant(
        name="pieces-of-a-cpu-on-a-gpu",
        mistake="65k tokens and a vocabulary of 152k make 594 pieces of a CPU's size on a GPU",
        file="rlhf_pg/trainers/learner.py",
        old="critic, tokens, piece(runtime))",
        new="critic, tokens, 2**24)",
        killers=(f"{BUDGET}::test_the_pieces_of_the_logits_are_those_of_the_device",),
    ),
    Mutant(
        name="pieces-by-the-own-gpu",
        mistake="a larger GPU calls an adapted head less often, and others wait for it",
        file="rlhf_pg/trainers/budget.py",
        old="return -runtime.most(-piece_for(memory))",
        new="return piece_for(memory)",
        killers=(f"{BUDGET}::test_pieces_are_those_of_the_smallest_gpu",),
    ),
    Mutant(
        name="empty-pieces-left-out",
        mistake="a process with few rows calls the head less often, and others wait for it",
        file=FILE,
        old="for piece in zip(*split, strict=True)]",
        new="for piece in zip(*split, strict=True) if len(piece[0])]",
        killers=(f"{HEAD}::test_the_head_is_called_as_often_whatever_the_rows",),
    ),
    Mutant(
        name="logits-kept-by-every-piece",
        mistake="the head is called in pieces whose logits all stay until the backward pass",
        file=SOFTMAX,
        old="ctx.save_for_backward(output if again is None else None, tokens, entropies)",
        new="ctx.save_for_backward(output, tokens, entropies)",
        killers=(f"{HEAD}::test_memory_is_that_of_one_piece",),
    ),
    Mutant(
        name="another-dropout-in-the-backward-pass",
        mistake="logits that are computed again have another dropout than those that were scored",
        file=FILE,
        old="if self.parts > 1 and not _drops(layer):",
        new="if self.parts > 1:",
        killers=(f"{HEAD}::test_dropout_on_the_head_is_the_same_forward_and_backward",),
    ),
    Mutant(
        name="gradient-of-entropy-without-entropy",
        mistake="the gradient of the entropy is -p log p, as if p were not normalised",
        file=SOFTMAX,
        old="everywhere.add_(entropies[rows, None])",
        new="everywhere",
        killers=(f"{HEAD}::test_the_gradient_is_that_of_finite_differences",),
    ),
    Mutant(
        name="temperature-not-in-the-gradient",
        mistake="the temperature divides the logits, and not their gradient",
        file=SOFTMAX,
        old="to_logprobs = to_logprobs[:, None] * self.slope",
        new="to_logprobs = to_logprobs[:, None]",
        killers=(f"{HEAD}::test_the_gradient_is_that_of_finite_differences",),
    ),
    Mutant(
        name="impossible-logits-are-nan",
        mistake="0 times the log-probability of an impossible token is NaN",
        file=SOFTMAX,
        old="everywhere = z.log_softmax(-1).clamp_(min=IMPOSSIBLE)",
        new="everywhere = z.log_softmax(-1)",
        killers=(f"{HEAD}::test_impossible_logits_leave_numbers_and_gradients_finite",),
    ),
    Mutant(
        name="one-minus-p-in-half-precision",
        mistake="the gradient of a bfloat16 logit is rounded before 1 is added to it",
        file=SOFTMAX,
        old="gradient.scatter_add_(1, tokens[rows, None], to_logprobs[rows])",
        new="gradient = gradient.to(output.dtype).scatter_add_("
        "1, tokens[rows, None], to_logprobs[rows].to(output.dtype))",
        killers=(f"{HEAD}::test_half_precision_is_scored_in_single",),
    ),
    Mutant(
        name="cap-without-its-slope",
        mistake="a soft cap bends the logits, and their gradient goes straight",
        file=SOFTMAX,
        old="output[rows] = gradient if bend is None else gradient.mul_(bend)",
        new="output[rows] = gradient",
        killers=(f"{FINISH}::test_scores_are_those_of_the_models_own_logits",),
    ),
    Mutant(
        name="cap-not-seen-on-small-logits",
        mistake="what a model does after its head is read off logits too small to show it",
        file="rlhf_pg/models/finish.py",
        old="2.0**-20, 2.0**100",
        new="2.0**-20, 2.0**-10",
        killers=(f"{FINISH}::test_a_scale_and_a_soft_cap_are_measured_whatever_the_logits_are",),
    ),
    Mutant(
        name="logits-scale-forgotten",
        mistake="Cohere and Granite scale what their head gives, and are scored without it",
        file=SOFTMAX,
        old="return self.finish.scale / self.temperature",
        new="return 1 / self.temperature",
        killers=(f"{FINISH}::test_scores_are_those_of_the_models_own_logits",),
    ),
]
