"""One self-contained HTML file: our script and style, uPlot, and data that stays data.

Texts of models, servers and users are in the page only as JSON and as compressed bytes, inside
elements that a browser does not run, and the script makes text nodes of them. The page's content
security policy (CSP) allows only its own scripts, by their hashes, and no requests.
"""

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf_pg.boundary.output_files import write_file
from rlhf_pg.boundary.quoted import visible
from rlhf_pg.report.run_files import finite

PARTS = Path(__file__).parent / "page"
STYLES = ("uPlot.min.css", "report.css")
# Two scripts: the library, then our own, in a scope of its own.
LIBRARY = "uPlot.iife.min.js"
OURS = ("base.js", "charts.js", "tokens.js", "report.js")


def table(
    title: str, head: list[str], rows: list[list[str]], dimmed: int = 0, note: str = ""
) -> dict[str, Any]:
    """Return a text table for a page, in visible characters; the last `dimmed` rows are dim."""
    return {
        "title": visible(title),
        "head": list(map(visible, head)),
        "rows": [list(map(visible, row)) for row in rows],
        "dimmed": dimmed,
        "note": visible(note),
    }


def write_document(
    path: Path, title: str, data: Mapping[str, Any], steps: Iterable[tuple[int, bytes]] = ()
) -> None:
    """Write a page with data for its script, and packed tokens by step."""
    write_file(path, (piece.encode() for piece in _document(title, data, steps)))


def _document(
    title: str, data: Mapping[str, Any], steps: Iterable[tuple[int, bytes]]
) -> Iterator[str]:
    style = "\n".join(part(name) for name in STYLES)
    scripts = [part(LIBRARY), "(() => {\n" + "\n".join(map(part, OURS)) + "\n})();"]
    policy = (
        f"default-src 'none'; script-src {' '.join(map(hash_of, scripts))}; "
        f"style-src {hash_of(style)}; img-src data:; connect-src 'none'; base-uri 'none'; "
        "form-action 'none'"
    )
    # JSON in ASCII that cannot end its element, nor a line of a script.
    content = json.dumps(finite(data), allow_nan=False, separators=(",", ":"))
    content = content.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    yield (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>{html.escape(visible(title))}</title>\n"
        f"<style>{style}</style>\n</head>\n<body>\n"
        "<noscript>This page needs JavaScript to draw its curves.</noscript>\n"
        f'<script type="application/json" id="data">{content}</script>\n'
    )
    for script in scripts:
        yield f"<script>{script}</script>\n"
    # After the scripts, which show the curves while these are still being read.
    for step, packed in steps:
        encoded = base64.b64encode(packed).decode()
        yield f'<script type="application/gzip" id="step-{step}">{encoded}</script>\n'
    yield "</body>\n</html>\n"


def hash_of(text: str) -> str:
    """Return the source expression for an inline script or style."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def part(name: str) -> str:
    """Return the text of a file of the page."""
    return (PARTS / name).read_text(encoding="utf-8")
