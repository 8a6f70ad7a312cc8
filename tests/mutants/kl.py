"""Mistakes in the KL, as an estimate and as a loss, and in the controllers."""

from tests.mutants import Mutant

MUTANTS = [
    Mutant(
        name="kl-k1-sign",
        mistake="the KL with its sign flipped, so that beta rewards distance (the RLHF book)",
        target="rlhf_pg.kl.kl_estimate",
        old="        return u\n",
        new="        return -u\n",
        killers=("tests/test_kl.py::test_estimates_by_hand",),
    ),
    Mutant(
        name="kl-k3-sign",
        mistake="k3 with exp(u) for exp(-u): right only for samples of the reference",
        target="rlhf_pg.kl.kl_estimate",
        old="    u = logprobs - ref_logprobs\n",
        new="    u = logprobs - ref_logprobs if estimator != 'k3' else ref_logprobs - logprobs\n",
        killers=("tests/test_kl.py::test_estimates_by_hand",),
    ),
    Mutant(
        name="kl-k2-without-its-half",
        mistake="k2 = u^2: twice the gradient of the KL",
        target="rlhf_pg.kl.kl_estimate",
        old="        return u**2 / 2\n",
        new="        return u**2\n",
        killers=("tests/test_kl.py::test_expected_gradient_as_a_loss",),
    ),
    Mutant(
        name="kl-k3-clamped",
        mistake="k3 clamped at 10: no gradient where the policy is far off (verl, OpenRLHF)",
        target="rlhf_pg.kl.kl_estimate",
        old="        return torch.expm1(-u) + u\n",
        new="        return (torch.expm1(-u) + u).clamp(-10, 10)\n",
        killers=("tests/test_kl.py::test_far_from_the_reference_the_gradient_still_pulls_back",),
    ),
    Mutant(
        name="kl-k3-loses-its-digits",
        mistake="exp(-u) - 1 + u: rounding noise in place of the KL near the reference",
        target="rlhf_pg.kl.kl_estimate",
        old="        return torch.expm1(-u) + u\n",
        new="        return torch.exp(-u) - 1 + u\n",
        killers=("tests/test_kl.py::test_k3_keeps_its_digits_near_zero",),
    ),
    Mutant(
        name="kl-loss-masked-by-a-product",
        mistake="padding multiplied away: NaN * 0 is NaN",
        target="rlhf_pg.kl.kl_loss",
        old="    logprobs = torch.where(mask, logprobs, 0.0)\n",
        new="    logprobs = logprobs * mask\n",
        killers=(
            "tests/test_kl.py::"
            "test_losses_and_their_gradients_match_a_loop_and_masked_slots_never_matter",
        ),
    ),
    Mutant(
        name="kl-straight-through-reversed",
        mistake="straight-through the wrong way round: the value of k2, the gradient of k3",
        target="rlhf_pg.kl.kl_loss",
        old='"k2_straight_through": (k3, u)',
        new='"k2_straight_through": (u**2 / 2, -torch.expm1(-u))',
        killers=("tests/test_kl.py::test_expected_gradient_of_a_loss_on_policy",),
    ),
    Mutant(
        name="kl-straight-through-of-k3",
        mistake="the gradient of k3 under a name that promises that of k2",
        target="rlhf_pg.kl.kl_loss",
        old='"k2_straight_through": (k3, u)',
        new='"k2_straight_through": (k3, -torch.expm1(-u))',
        killers=("tests/test_kl.py::test_expected_gradient_of_a_loss_on_policy",),
    ),
    Mutant(
        name="kl-ratio-detached",
        mistake="rho k3 with a detached rho: the gradient of KL(pi_ref || pi)",
        target="rlhf_pg.kl.kl_loss",
        old="(rho * k3, rho * u)",
        new="(rho * k3, rho * -torch.expm1(-u))",
        killers=("tests/test_kl.py::test_expected_gradient_of_a_loss_on_policy",),
    ),
    Mutant(
        name="kl-ratio-forgotten",
        mistake="off policy without rho: tokens weighted by the policy of yesterday",
        target="rlhf_pg.kl.kl_loss",
        old="(rho * k3, rho * u)",
        new="(rho * k3, u)",
        killers=("tests/test_kl.py::test_only_the_forms_with_a_ratio_are_exact_off_policy",),
    ),
    Mutant(
        name="kl-ratio-inverted",
        mistake="pi_old / pi for pi / pi_old (a well-known blog)",
        target="rlhf_pg.kl.kl_loss",
        old="now - old_logprobs.detach()",
        new="old_logprobs.detach() - now",
        killers=("tests/test_kl.py::test_only_the_forms_with_a_ratio_are_exact_off_policy",),
    ),
    Mutant(
        name="kl-ratio-of-the-reference",
        mistake="rho against the reference, not the policy that sampled (the RLHF book)",
        target="rlhf_pg.kl.kl_loss",
        old="now - old_logprobs.detach()",
        new="now - ref_logprobs",
        killers=("tests/test_kl.py::test_expected_gradient_of_a_loss_on_policy",),
    ),
    Mutant(
        name="kl-ratio-not-held",
        mistake="exp of any log ratio: one stale token makes the loss inf",
        target="rlhf_pg.kl.kl_loss",
        old="    rho = log_rho.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()\n",
        new="    rho = log_rho.exp()\n",
        killers=("tests/test_kl.py::test_a_ratio_out_of_bounds_is_held_and_keeps_its_gradient",),
    ),
    Mutant(
        name="kl-to-go-without-the-own-token",
        mistake="the sum to go begins after the token itself",
        target="rlhf_pg.kl.kl_loss",
        old='"k1_to_go": (u, rho * to_go)',
        new='"k1_to_go": (u, rho * (to_go - u))',
        killers=("tests/test_kl.py::test_k1_to_go_is_the_gradient_of_the_kl_of_completions",),
    ),
    Mutant(
        name="kl-to-go-not-reversed",
        mistake="a sum from the beginning: the KL that a token could no longer change",
        target="rlhf_pg.kl.kl_loss",
        old="discounted_returns(u, mask)",
        new="u.cumsum(1)",
        killers=("tests/test_kl.py::test_k1_to_go_is_the_gradient_of_the_kl_of_completions",),
    ),
    Mutant(
        name="kl-to-go-of-one-token",
        mistake="u_t for the sum to go: early tokens are not charged for what they lead to",
        target="rlhf_pg.kl.kl_loss",
        old='"k1_to_go": (u, rho * to_go)',
        new='"k1_to_go": (u, rho * u)',
        killers=("tests/test_kl.py::test_k1_to_go_is_the_gradient_of_the_kl_of_completions",),
    ),
    Mutant(
        name="kl-k1-as-a-loss",
        mistake="k1 as a loss: its expected gradient is 0, all it adds is noise",
        target="rlhf_pg.kl.kl_loss",
        old="    _check_loss(estimator)\n",
        new="    if estimator == 'k1':\n        return kl_estimate(logprobs, ref_logprobs, 'k1')\n",
        killers=("tests/test_kl.py::test_what_cannot_be_a_loss_is_refused",),
    ),
    Mutant(
        name="kl-reference-learns",
        mistake="the reference gets a gradient of its own",
        target="rlhf_pg.kl.kl_loss",
        old="ref_logprobs.detach()",
        new="ref_logprobs",
        killers=("tests/test_kl.py::test_only_the_policy_gets_a_gradient",),
    ),
    Mutant(
        name="kl-controller-unclipped",
        mistake="Ziegler's controller without the clip: one bad step multiplies the coefficient",
        target="rlhf_pg.kl.AdaptiveKLController.update",
        old="min(max(kl / self.target - 1, -0.2), 0.2)",
        new="kl / self.target - 1",
        killers=(
            "tests/test_controllers.py::test_adaptive_controller_moves_with_the_clipped_error",
        ),
    ),
    Mutant(
        name="kl-controller-horizon-inverted",
        mistake="horizon / num_samples for num_samples / horizon",
        target="rlhf_pg.kl.AdaptiveKLController.update",
        old="error * num_samples / self.horizon",
        new="error * self.horizon / num_samples",
        killers=(
            "tests/test_controllers.py::test_adaptive_controller_moves_with_the_clipped_error",
        ),
    ),
    Mutant(
        name="kl-controller-swallows-nan",
        mistake="one NaN stays in the coefficient and in every checkpoint after it",
        target="rlhf_pg.kl.AdaptiveKLController.update",
        old="        if kl != kl:\n",
        new="        if False:\n",
        killers=("tests/test_controllers.py::test_a_measurement_that_is_nan_changes_nothing",),
    ),
    Mutant(
        name="kl-penalty-swapped",
        mistake="PPO's penalty doubled where the KL is small, as if it were large",
        target="rlhf_pg.kl.PenaltyKLController.update",
        old="        if kl < self.target / 1.5:\n            self.coef /= 2\n",
        new="        if kl < self.target / 1.5:\n            self.coef *= 2\n",
        killers=(
            "tests/test_controllers.py::test_penalty_controller_halves_below_and_doubles_above",
        ),
    ),
    Mutant(
        name="kl-penalty-thresholds",
        mistake="PPO's penalty moved at the target itself, without the band of 1.5 around it",
        target="rlhf_pg.kl.PenaltyKLController.update",
        old="        elif kl > self.target * 1.5:\n",
        new="        elif kl > self.target:\n",
        killers=(
            "tests/test_controllers.py::test_penalty_controller_halves_below_and_doubles_above",
        ),
    ),
    Mutant(
        name="entropy-controller-sign",
        mistake="the bonus eased as the entropy collapses",
        target="rlhf_pg.trainers.controllers.EntropyController.update",
        old="self.coef = min(max(self.coef + step",
        new="self.coef = min(max(self.coef - step",
        killers=(
            "tests/test_controllers.py::"
            "test_entropy_controller_pushes_below_the_target_and_eases_above_it",
        ),
    ),
    Mutant(
        name="entropy-controller-unbounded",
        mistake="a coefficient below 0: the bonus turns into a penalty on entropy",
        target="rlhf_pg.trainers.controllers.EntropyController.update",
        old="max(self.coef + step, self.minimum)",
        new="self.coef + step",
        killers=(
            "tests/test_controllers.py::test_entropy_controller_lands_on_bounds_that_no_step_meets",
        ),
    ),
    Mutant(
        name="kl-rate-swapped",
        mistake="the learning rate raised where an update moved too far",
        target="rlhf_pg.trainers.controllers.KLAdaptiveRate.update",
        old="self.coef = max(self.coef / 1.5, self.minimum)",
        new="self.coef = min(self.coef * 1.5, self.maximum)",
        killers=(
            "tests/test_controllers.py::"
            "test_rate_falls_above_twice_the_target_and_rises_below_half_of_it",
        ),
    ),
    Mutant(
        name="kl-rate-unbounded",
        mistake="no bound: while nothing is learnt the rate grows by 1.5 at every update",
        target="rlhf_pg.trainers.controllers.KLAdaptiveRate.update",
        old="min(self.coef * 1.5, self.maximum)",
        new="self.coef * 1.5",
        killers=(
            "tests/test_controllers.py::test_rate_begins_at_one_and_stays_within_a_factor_of_ten",
        ),
    ),
    Mutant(
        name="old-kl-before-the-last-update",
        mistake="the KL that moves a coefficient measured where the last update has not moved yet",
        target="rlhf_pg.trainers.learner.Learner.update",
        old="            metrics = self._updates(experience, step, meter)\n",
        new="            seen = self._moved(experience)\n"
        "            metrics = self._updates(experience, step, meter)\n"
        "            self._moved = lambda _: seen\n",
        killers=(
            "tests/trainers/test_controllers.py::"
            "test_what_moves_a_coefficient_is_the_exact_kl_after_the_last_update",
        ),
    ),
    Mutant(
        name="old-kl-turned-round",
        mistake="exp(-u) of new to old: for samples of the old policy that is no KL at all",
        target="rlhf_pg.trainers.learner.Learner._moved",
        old='kl_estimate(experience.old_logprobs, now.old_logprobs, "k3")',
        new='kl_estimate(now.old_logprobs, experience.old_logprobs, "k3")',
        killers=(
            "tests/trainers/test_controllers.py::"
            "test_what_moves_a_coefficient_is_the_exact_kl_after_the_last_update",
        ),
    ),
]
