"""Hooks of mkdocs.yml: the README, and every file that a page links to, is a page of the site."""

import json
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)[^)#]+")
ADVICE = ("usage", "guide", "options", "rewards", "your-data")
LANGUAGES = {".py": "python", ".ipynb": "python", ".yaml": "yaml", ".txt": "diff"}


def place(path: str) -> str:
    """Return where the site has a file of the repository: what is no page or picture, as a page."""
    inside = "index.md" if path == "README.md" else path.removeprefix("docs/")
    return inside if path.endswith((".md", ".svg", ".png")) else f"{inside}.md"


def targets(path: str) -> dict[str, str]:
    """Return the links of a page, and the files of the repository that they lead to."""
    links = LINK.findall((ROOT / path).read_text())
    return {link: os.path.normpath(Path(path).parent / link) for link in links}


def relinked(path: str) -> str:
    """Return the text of a page, with its links as the site has them."""
    above, moved = Path(place(path)).parent, targets(path)
    text = (ROOT / path).read_text()
    return LINK.sub(lambda link: os.path.relpath(place(moved[link[0]]), above), text)


def source(path: str) -> str:
    """Return a page that shows a file, and that a search does not find."""
    text, suffix = (ROOT / path).read_text(), Path(path).suffix
    cells = json.loads(text)["cells"] if suffix == ".ipynb" else [{"source": text}]
    code = f"````{LANGUAGES.get(suffix, 'text')}\n{{}}\n````"
    blocks = ["---\nsearch: {exclude: true}\n---", f"# `{path}`" if len(cells) == 1 else ""]
    for cell in cells:
        form = "{}" if cell.get("cell_type") == "markdown" else code
        blocks.append(form.format("".join(cell["source"])))
    return "\n\n".join(blocks)


def on_files(files: Files, config: Any) -> None:
    """Add the README, what pages link to that is not a page yet, and what these link to in turn."""
    own = [f"docs/{file.src_uri}" for file in files if file.inclusion.is_included()]
    paths = ["README.md", *own]
    for path in paths:
        is_page = path.endswith(".md")
        if path not in own:
            text, level = relinked(path) if is_page else source(path), InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, place(path), content=text, inclusion=level))
        if is_page:
            linked = {one for one in targets(path).values() if (ROOT / one).is_file()}
            paths += sorted(linked - {*paths})


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return a page of `docs/` with links to the pages above; a search finds advice first."""
    if page.file.generated_by:
        return markdown
    page.meta["search"] = {"boost": 2 if page.file.name in ADVICE else 1}
    return relinked(f"docs/{page.file.src_uri}")
