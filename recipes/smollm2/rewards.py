"""The reward of the recipe smollm2_happy: how happy a sentence is."""

from typing import Any

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

ANALYZER = SentimentIntensityAnalyzer()


def happiness(completions: list[Any], **columns: Any) -> list[float]:
    """Score a finished sentence by VADER's sentiment, -1 to 1 (Hutto and Gilbert 2014).

    One that does not end in a full stop gets -1.
    """
    texts = [said[-1]["content"].strip() for said in completions]
    return [
        ANALYZER.polarity_scores(text)["compound"] if text.endswith((".", "!", "?")) else -1.0
        for text in texts
    ]
