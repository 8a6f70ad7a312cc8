"""The image and the form for its report name what exists."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
ARGUMENTS = dict(re.findall(r"^ARG (\w+)=(\S+)$", DOCKERFILE, re.M))


def test_image_has_tested_torch_version() -> None:
    """Or pip would download another one over it."""
    constraints = (ROOT / ARGUMENTS["CONSTRAINTS"]).read_text()
    wanted = re.search(r"^torch==(\S+)$", constraints, re.M)[1]
    images = [ARGUMENTS["BASE"], *re.findall(r"BASE=(pytorch/\S+)", DOCKERFILE)]
    assert {image.split(":")[1].split("-")[0] for image in images} == {wanted}


def test_image_uses_existing_extras_and_files() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [extras.strip(".") for extras in re.findall(r"EXTRAS=([\w,]+)", DOCKERFILE)]
    assert len(named) == 2
    assert {extra for extras in named for extra in extras.split(",")} <= set(
        project["optional-dependencies"]
    )
    command = re.search(r'^CMD \["([^"]+)", "--json", "/reports/', DOCKERFILE, re.M)[1]
    assert (ROOT / command).stat().st_mode & 0o111
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert not {"tests", "constraints.txt", "examples"} & set(ignored)
    assert ".git" in ignored


def test_workflows_pin_actions_by_commit() -> None:
    for file in (ROOT / ".github/workflows").iterdir():
        for action in re.findall(r"uses: (\S+)", file.read_text()):
            assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action), action
