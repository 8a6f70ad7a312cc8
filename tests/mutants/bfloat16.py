"""Mistakes in how an update reaches weights in bfloat16."""

from tests.mutants import Mutant

TESTS = "tests/runtime/test_bf16_updates.py"

MUTANTS = [
    Mutant(
        name="masters-from-rounded-weights",
        mistake="float32 masters are made anew from the bfloat16 weights before every update",
        target="rlhf_pg.runtime.bf16_updates.Nearest",
        old="            weight.grad = None\n\n    def step",
        new="            weight.grad = None\n"
        "            master.data.copy_(weight.detach())\n\n    def step",
        killers=(f"{TESTS}::test_updates_below_last_bit_add_up_only_in_masters",),
    ),
    Mutant(
        name="masters-not-followed",
        mistake="float32 masters go on from what they were before other weights were loaded",
        target="rlhf_pg.runtime.bf16_updates.MasterWeights.refresh",
        old="            master.copy_(weight)\n",
        new="            pass\n",
        killers=(f"{TESTS}::test_masters_follow_weights_loaded_without_masters",),
    ),
    Mutant(
        name="weights-without-gradient-rounded",
        mistake="a weight that an update leaves alone is moved to another neighbour all the same",
        target="rlhf_pg.runtime.bf16_updates.StochasticRounding.step",
        old="            if gradient is not None:\n",
        new="            gradient = weight * 0.0 if gradient is None else gradient\n"
        "            if True:\n",
        killers=(f"{TESTS}::test_weight_without_gradient_is_unchanged",),
    ),
    Mutant(
        name="biased-stochastic-rounding",
        mistake="stochastic rounding draws from 15 bits, and is biased towards 0",
        target="rlhf_pg.runtime.bf16_updates.round_stochastically",
        old="& 0xFFFF\n",
        new="& 0x7FFF\n",
        killers=(f"{TESTS}::test_number_is_rounded_to_neighbours_proportionally",),
    ),
    Mutant(
        name="stochastic-rounding-of-nan",
        mistake="stochastic rounding makes numbers of what is not a number",
        target="rlhf_pg.runtime.bf16_updates.round_stochastically",
        old="torch.where(part.isfinite(), bits.view(torch.float32), part)",
        new="bits.view(torch.float32)",
        killers=(f"{TESTS}::test_non_finite_numbers_stay_non_finite",),
    ),
    Mutant(
        name="rounding-noise-of-a-piece",
        mistake="every piece of a weight begins with the same rounding noise",
        target="rlhf_pg.runtime.bf16_updates.round_stochastically",
        old="        first = offset + start\n",
        new="        first = start\n",
        killers=(f"{TESTS}::test_chunk_is_rounded_as_in_whole",),
    ),
    Mutant(
        name="rounding-noise-of-every-update",
        mistake="every update has the same rounding noise, so that what was rounded down stays so",
        target="rlhf_pg.runtime.bf16_updates.StochasticRounding._update",
        old=" + self._roundings[weight])",
        new=" + 0)",
        killers=(f"{TESTS}::test_mean_of_rounded_updates_is_exact",),
    ),
]
