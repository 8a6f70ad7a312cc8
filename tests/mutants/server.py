"""Mistakes in reading the answers of a server, an environment or a reward function."""

from tests.mutants import Mutant

SERVER = "tests/rollout/vllm/test_server.py"
QUOTED = "tests/boundary/test_quoted.py"
FAULT = f"{SERVER}::test_transient_fault_is_retried_lasting_fault_is_one_error"

MUTANTS = [
    Mutant(
        name="time-of-one-read",
        mistake="the time limit is that of each read, which a server that drips never reaches",
        target="rlhf_pg.rollout.vllm.http.Server._once",
        old="            asyncio.timeout(self.timeout),\n",
        new="            asyncio.timeout(None),\n",
        killers=(f"{SERVER}::test_endlessly_sending_server_times_out",),
    ),
    Mutant(
        name="redirects-followed",
        mistake="prompts are sent to wherever a server redirects them",
        target="rlhf_pg.rollout.vllm.http.Server.__init__",
        old="            timeout=None,  # our own",
        new="            follow_redirects=True,\n            timeout=None,  # our own",
        killers=(f"{SERVER}::test_redirect_is_not_followed",),
    ),
    Mutant(
        name="answers-of-any-size",
        mistake="an answer is kept whatever its size",
        target="rlhf_pg.boundary.http.body_of",
        old="        if size > most:",
        new="        if False:",
        killers=(f"{SERVER}::test_oversized_answer_is_rejected_early",),
    ),
    Mutant(
        name="proxy-for-loopback",
        mistake="what is asked of this machine goes to a proxy",
        target="rlhf_pg.rollout.vllm.http.Server.__init__",
        old="trust_env=not is_loopback(httpx2.URL(url).host)",
        new="trust_env=True",
        killers=(f"{SERVER}::test_environment_proxy_is_ignored_for_localhost",),
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
        killers=(f"{SERVER}::test_adapter_loaded_despite_bad_answer_is_used",),
    ),
    Mutant(
        name="sync-directory-shared",
        mistake="weights for a server are put under names that a user, or another run, may have",
        target="rlhf_pg.rollout.vllm.server.VllmServerEngine._own",
        old='own = Path(tempfile.mkdtemp(prefix="weights-", dir=self.directory))',
        new="own = self.directory",
        killers=(f"{SERVER}::test_user_files_in_sync_directory_are_kept",),
    ),
    Mutant(
        name="escapes-obeyed",
        mistake="what a server, an environment or a reward says is obeyed by the terminal",
        target="rlhf_pg.boundary.quoted._visible",
        old="    if character.isprintable():",
        new="    if True:",
        killers=(f"{QUOTED}::test_quoted_escapes_control_characters_and_hides_secrets",),
    ),
]
