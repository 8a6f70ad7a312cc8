"""The trainer on a tiny model, to compare commands with, and commands that are refused."""

import pytest

from rlhf_pg.cli import main
from tests.trainers.conftest import make as make


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a wrong command says, in one message."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    assert left.value.code == 2
    return capsys.readouterr().err
