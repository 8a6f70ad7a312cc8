"""A multi-turn environment as users of `verifiers` write it: a number to be guessed."""

import verifiers as vf
from datasets import Dataset


class HigherLower(vf.MultiTurnEnv):
    async def setup_state(self, state: vf.State) -> vf.State:
        state["guesses"] = []
        return state

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs) -> vf.Messages:
        guess = int(messages[-1].content)
        state["guesses"].append(guess)
        if guess == int(state["answer"]):
            state["final_env_response"] = [{"role": "user", "content": "yes"}]
            return state["final_env_response"]
        if guess == 13:
            raise vf.InfraError("the table has broken down")
        return [{"role": "user", "content": "lower" if guess > int(state["answer"]) else "higher"}]


class Forgetful(HigherLower):
    async def get_prompt_messages(self, state: vf.State) -> vf.Messages:
        messages = await super().get_prompt_messages(state)
        return messages[-1:] if len(messages) > 1 else messages


def load_environment(forgets: bool = False, groups: bool = False) -> vf.Environment:
    async def speed(state) -> float:
        found = state["guesses"][-1:] == [int(state["answer"])]
        return found / max(1, len(state["guesses"]))

    def best_of_group(states) -> list[float]:
        return [0.0 for _ in states]

    kind = Forgetful if forgets else HigherLower
    return kind(
        dataset=Dataset.from_list([{"question": "0 to 9", "answer": "5"}]),
        rubric=vf.Rubric(funcs=[best_of_group if groups else speed]),
        max_turns=4,
    )
