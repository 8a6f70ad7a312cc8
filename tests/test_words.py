"""Every docstring begins with one full sentence that stands alone."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlhf_pg

ROOT = Path(rlhf_pg.__file__).parent
FILES = [str(path.relative_to(ROOT)) for path in sorted(ROOT.rglob("*.py"))]
# A sentence that begins with one of these continues another one.
LEANING = {
    *("about", "above", "across", "after", "against", "along", "among", "around", "as", "at"),
    *("because", "before", "behind", "below", "beside", "besides", "between", "beyond", "by"),
    *("during", "except", "from", "into", "like", "of", "off", "on", "onto", "out", "over", "past"),
    *("per", "since", "through", "till", "to", "toward", "towards", "under", "until", "up", "upon"),
    *("via", "with", "within", "without"),
    *("although", "and", "but", "if", "nor", "or", "so", "than", "though", "unless", "while"),
    *("how", "what", "whatever", "when", "whenever", "where", "wherever", "whether", "which"),
    *("who", "whoever", "whom", "whose", "why"),
    *("again", "also", "else", "here", "instead", "likewise", "otherwise", "see", "similarly"),
    *("then", "there", "thus"),
    *("he", "her", "his", "it", "its", "she", "such", "that", "their", "theirs", "them", "these"),
    *("they", "this", "those"),
}
# These may also begin a full sentence.
NEED_A_VERB = {"for", "in"}
VERBS = re.compile(
    r"\b(is|are|was|were|be|has|have|had|does|do|can|may|might|must|will|would|should|needs?|gives?"
    r"|takes?|makes?|keeps?|returns?|uses?|adds?|holds?|counts?|compute|computes|raises?)\b"
)
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
ABBREVIATED = r"(?<!\bal\.)(?<!\bEq\.)(?<!\bcf\.)(?<!\be\.g\.)(?<!\bi\.e\.)(?<!\bvs\.)"


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """The line and the text of every docstring of a file, those below attributes included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, (ast.Module, *DEFINITIONS)):
            continue
        before: ast.stmt | None = None
        for statement in node.body:
            may_be = before is None or isinstance(before, ast.Assign | ast.AnnAssign)
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))) if may_be:
                    yield statement.lineno, text
            before = statement


def first_sentence(text: str) -> str:
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    return re.split(rf"(?<=[.!?]){ABBREVIATED} (?=[^a-z])", paragraph)[0]


def fault(sentence: str) -> str | None:
    """Why a sentence does not stand alone; None if it does."""
    words = sentence.split()
    first = words[0].strip("`'\",:;.()").lower() if words else ""
    if len(words) < 3:
        return "has fewer than three words"
    if not sentence.endswith((".", "!", "?")):
        return "does not end in a full stop"
    if first in LEANING:
        return f"begins with {words[0]!r}"
    if first in NEED_A_VERB and not VERBS.search(sentence):
        return f"begins with {words[0]!r} and has no verb"
    return None


@pytest.mark.parametrize("name", FILES)
def test_docstring_starts_with_standalone_sentence(name):
    faults = [
        f"{name}:{line}: {why}: {sentence}"
        for line, text in docstrings(ROOT / name)
        for sentence in [first_sentence(text)]
        if (why := fault(sentence))
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "text",
    [
        *("Of AdamW.", "Likewise where it is negative.", "By how much at most.", "Their names."),
        *("Whether it is done.", "See `Stores` for the rest.", "For a method of an object."),
        *("Return the bytes of a tensor", "Optimizer steps.", "", "Return this:\n\n    x = y"),
    ],
)
def test_fragments_are_found(text):
    assert fault(first_sentence(text))


@pytest.mark.parametrize(
    "text",
    [
        *("Weight decay of AdamW.", "Return the names.", "In a group of one, the advantage is 0."),
        "Estimate advantages (Schulman et al. 2016, Eq. 16). Of two\nlines.",
        "Return a number.\n\n    x = y",
    ],
)
def test_complete_sentences_pass(text):
    assert fault(first_sentence(text)) is None
