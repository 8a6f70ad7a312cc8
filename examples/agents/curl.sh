#!/usr/bin/env bash
# An agent that is a shell script with curl and jq: it asks a second time if an answer is wrong.
#
#     algorithm: grpo
#     model_name_or_path: Qwen/Qwen3-0.6B
#     dataset_name: sums.jsonl
#     agent_program: bash examples/agents/curl.sh
#     max_completion_length: 1024
#     max_steps: 100
#
# The row comes as JSON on standard input: lines of sums.jsonl are such as
# {"prompt": "What is 17 + 25?", "answer": "42"}. The last line that is printed is the reward.
set -euo pipefail

row=$(cat)
answer=$(jq --raw-output .answer <<< "$row")
messages=$(jq '[{role: "user", content: .prompt}]' <<< "$row")
for reward in 1 0.5; do
    message=$(jq '{model: env.OPENAI_MODEL, messages: ., max_tokens: 256}' <<< "$messages" |
        curl --silent --show-error --fail "$OPENAI_BASE_URL/chat/completions" \
            --header "Authorization: Bearer $OPENAI_API_KEY" \
            --header "Content-Type: application/json" --data @- |
        jq '.choices[0].message')
    numbers=$(jq --raw-output .content <<< "$message" | grep -Eao -e '-?[0-9]+' || true)
    if [ "$(tail --lines 1 <<< "$numbers")" = "$answer" ]; then
        echo "$reward"
        exit
    fi
    messages=$(jq --argjson said "$message" \
        '. + [$said, {role: "user", content: "That is wrong. Try again."}]' <<< "$messages")
done
echo 0
