"""Self-play in a game of textarena: the policy is both players, and each turn is paid by the
result of the player whose turn it was: 1, 0 or -1.

    algorithm: reinforce
    agent_credit: branch
    model_name_or_path: Qwen/Qwen3-0.6B
    dataset_name: games.jsonl
    agent_program: examples/agents/self_play.py:play
    max_completion_length: 8192
    max_steps: 100

Needs `pip install textarena`; games.jsonl has one line, {"prompt": "TicTacToe-v0-raw"}, or more
with other games of two players. A name that ends in -raw shows a player only what is new to it, so
that its chat grows and nothing of it is rewritten. The row of an episode holds both chats.
"""

import openai
import textarena


def play(row, endpoint):
    """Return a reward for each call, the result at a player's last: player 0's, then player 1's."""
    game = textarena.make(row["prompt"])
    game.reset(num_players=2)
    # With an endpoint of its own, each player's calls are numbered and paid apart.
    players = [endpoint.fork(), endpoint.fork()]
    clients = [openai.OpenAI(base_url=x.base_url, api_key=x.api_key) for x in players]
    chats, turns, done = ([], []), [0, 0], False
    while not done:
        player, news = game.get_observation()
        told = [text for author, text, _ in news if author != player]
        chats[player].append({"role": "user", "content": "\n\n".join(told)})
        reply = clients[player].chat.completions.create(
            model=endpoint.model, messages=chats[player], max_tokens=256
        )
        chats[player].append({"role": "assistant", "content": reply.choices[0].message.content})
        turns[player] += 1
        done, _ = game.step(chats[player][-1]["content"])
    results, _ = game.close()
    return [float(i == n) * results[p] for p, n in enumerate(turns) for i in range(1, n + 1)]
