"""Mistakes with what others say: a server, an environment, a reward function."""

from tests.mutants import Mutant

SERVER = "tests/rollout/vllm/test_server.py"
QUOTED = "tests/boundary/test_quoted.py"
FAULT = f"{SERVER}::test_a_fault_that_passes_is_survived_and_one_that_stays_is_one_error"

MUTANTS = [
    Mutant(
        name="time-of-one-read",
        mistake="the time limit is that of each read, which a server that drips never reaches",
        target="rlhf_pg.rollout.vllm.http.Server._once",
        old="            asyncio.timeout(self.timeout),\n",
        new="            asyncio.timeout(None),\n",
        killers=(f"{SERVER}::test_a_server_that_never_ends_is_given_up_although_it_never_pauses",),
    ),
    Mutant(
        name="redirects-followed",
        mistake="prompts are sent to wherever a server redirects them",
        target="rlhf_pg.rollout.vllm.http.Server.__init__",
        old="            timeout=None,  # our own",
        new="            follow_redirects=True,\n            timeout=None,  # our own",
        killers=(f"{SERVER}::test_a_server_that_sends_us_elsewhere_is_not_followed",),
    ),
    Mutant(
        name="answers-of-any-size",
        mistake="an answer is kept whatever its size",
        target="rlhf_pg.rollout.vllm.http._body",
        old="        if size > most:",
        new="        if False:",
        killers=(f"{SERVER}::test_bytes_that_were_not_asked_for_are_not_kept",),
    ),
    Mutant(
        name="proxy-for-loopback",
        mistake="what is asked of this machine goes to a proxy",
        target="rlhf_pg.rollout.vllm.http.Server.__init__",
        old="trust_env=not _is_loopback(httpx2.URL(url).host)",
        new="trust_env=True",
        killers=(f"{SERVER}::test_a_proxy_of_the_environment_is_not_asked_for_this_machine",),
    ),
    Mutant(
        name="tokens-after-eos-from-a-server",
        mistake="tokens that a server has sent after EOS are trained on",
        target="rlhf_pg.rollout.vllm.answers.Wanted._ending",
        old="        if any(ended[:-1]):",
        new="        if False:",
        killers=(FAULT,),
    ),
    Mutant(
        name="ids-beyond-the-vocabulary",
        mistake="an id of a server's that the model does not have is looked up in its embeddings",
        target="rlhf_pg.rollout.vllm.answers.Wanted.read",
        old="not 0 <= token < self.vocab_size",
        new="token < 0",
        killers=(FAULT,),
    ),
    Mutant(
        name="infinite-log-probabilities",
        mistake="a log-probability of minus infinity is believed (vLLM says -9999 for it)",
        target="rlhf_pg.rollout.vllm.answers.Wanted.read",
        old="not LEAST < logprob <= ROUNDING",
        new="not logprob <= ROUNDING",
        killers=(FAULT,),
    ),
    Mutant(
        name="adapter-lost-with-the-answer",
        mistake="an adapter that was loaded, and whose answer was lost, ends the run",
        target="rlhf_pg.rollout.vllm.server.VllmServerEngine._load",
        old="            if name not in self._models():\n                raise\n",
        new="            raise\n",
        killers=(f"{SERVER}::test_an_adapter_that_was_loaded_is_not_lost_with_the_answer",),
    ),
    Mutant(
        name="sync-directory-shared",
        mistake="weights for a server are put under names that a user, or another run, may have",
        target="rlhf_pg.rollout.vllm.server.VllmServerEngine._own",
        old='own = Path(tempfile.mkdtemp(prefix="weights-", dir=self.directory))',
        new="own = self.directory",
        killers=(f"{SERVER}::test_what_is_the_users_in_the_sync_directory_stays",),
    ),
    Mutant(
        name="escapes-obeyed",
        mistake="what a server, an environment or a reward says is obeyed by the terminal",
        target="rlhf_pg.boundary.quoted._visible",
        old="    if character.isprintable():",
        new="    if True:",
        killers=(f"{QUOTED}::test_what_a_terminal_obeys_or_a_url_hides_is_not_said",),
    ),
]
