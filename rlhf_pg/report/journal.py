"""The output of a running process: its console, and the files that grow step by step."""

import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text
from safetensors import SafetensorError

from rlhf_pg.boundary.output_files import PARTIAL
from rlhf_pg.boundary.quoted import tell, visible
from rlhf_pg.checkpoint.run_dir import set_aside
from rlhf_pg.data.chat import last_text
from rlhf_pg.report import run_files
from rlhf_pg.report.troubles import MetricsLine, troubles

logger = logging.getLogger(__name__)

FIRST = 3.0  # seconds until the first page, which a short run does not need
SHARE = 100  # updating the page takes at most 1 / SHARE of the time


class Journal:
    """Console and run directory of the main process; other processes write nothing."""

    def __init__(
        self,
        directory: Path,
        after_step: int,
        is_main: bool,
        shown: Sequence[str] = (),
    ) -> None:
        self.is_main = is_main
        self._shown = shown
        self.console = console = Console(quiet=not is_main)
        updates = console.is_terminal or (console.is_jupyter and find_spec("ipywidgets"))
        self._bar = Progress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.description}", markup=False, table_column=Column()),  # may wrap
            TimeRemainingColumn(),
            console=console,
            disable=not updates,
        )
        self._total = 0
        self._task = self._bar.add_task("")
        self._lacks_tokens = False
        if not is_main:
            return
        directory.mkdir(parents=True, exist_ok=True)
        if after_step > 0:
            self.say(f"resuming after step {after_step}")
        elif (moved := set_aside(directory)) is not None:
            self.say(moved)
        self._metrics = run_files.JsonLines(directory / run_files.METRICS, after_step)
        self._completions = run_files.JsonLines(directory / run_files.COMPLETIONS, after_step)
        self._trace = run_files.JsonLines(directory / run_files.TRACE, after_step, synced=False)
        self._directory = directory
        self._report_due = time.monotonic() + FIRST
        self._report_failed = False
        self._lines = run_files.read(directory / run_files.METRICS)
        self._warned = {trouble.title for trouble in troubles(self._lines)}
        tokens = directory / run_files.TOKENS
        for file in (*directory.glob(f"{PARTIAL}*"), *tokens.glob(f"{PARTIAL}*")):
            if file.is_file():  # of a process that was killed
                file.unlink()
        for file in tokens.glob("*step-" + "[0-9]" * 8 + ".safetensors"):
            if int(file.stem[-8:]) > after_step:  # a resumed run repeats this step
                file.unlink()

    def say(self, line: str) -> None:
        """Print a line, escaping characters that the terminal cannot show."""
        encoding = getattr(self.console.file, "encoding", None) or "utf-8"
        line = visible(line).encode(encoding, "backslashreplace").decode(encoding)
        self._show(lambda: self.console.print(Text(line), soft_wrap=True))

    def _show(self, act: Callable[[], None]) -> None:
        """Show something; if that fails, disable the console."""
        try:
            act()
        except (OSError, SystemExit) as error:  # a full disk, or a closed pipe
            self.console.quiet = True
            logger.warning("console output is disabled: %s", error)

    @contextmanager
    def progress(self, total_steps: int) -> Iterator[None]:
        """Show a progress bar, or about twenty lines if it cannot move; report at the end."""
        self._total = total_steps
        self._bar.update(self._task, total=total_steps)
        self._show(self._bar.start)
        try:
            yield
        finally:
            self._show(self._bar.refresh)  # `stop` does not in a notebook
            self._show(self._bar.stop)
            if self.is_main:
                self._report(running=False)

    def step(self, metrics: dict[str, Any]) -> None:
        """Save the metrics of a step, and show them."""
        if not self.is_main:
            return
        self._metrics.write(metrics)
        self._report(running=True)
        self._warn(metrics)
        step = metrics["step"]
        summary = summarize(metrics, *self._shown)
        if not self._bar.disable:
            self._bar.update(self._task, completed=step, description=summary)
        elif step % max(1, self._total // 20) == 0 or step == self._total:
            self.say(f"step {step}/{self._total}  {summary}  {metrics['step_time']:.2f} s/step")

    def _report(self, running: bool) -> None:
        """Write the report, if it is due or the last; failures cause one warning."""
        begun = time.monotonic()
        if running and begun < self._report_due:
            return
        try:
            from rlhf_pg.report.run_page import write_report

            write_report(self._directory, running=running)
        except Exception as error:  # a full disk or a damaged file must not end a run
            if not self._report_failed:
                logger.warning("%s/report.html is not up to date: %s", self._directory, tell(error))
            self._report_failed = True
        self._report_due = time.monotonic() + SHARE * (time.monotonic() - begun)

    def _warn(self, metrics: dict[str, Any]) -> None:
        """Show the troubles of the run in its first and latest steps, each of them once."""
        self._lines.append(metrics)
        del self._lines[20:-20]  # or else the rules would take longer with every step
        for trouble in troubles(self._lines):
            if trouble.title not in self._warned:
                self._warned.add(trouble.title)
                self.say(f"step {trouble.step}: {trouble.title} ({trouble.key}). {trouble.text}")

    def trace(self, line: MetricsLine) -> None:
        """Save a line of trace.jsonl."""
        if self.is_main:
            self._trace.write(line)

    def record(self, record: run_files.StepRecord) -> None:
        """Save the record of a step, and show some of its completions, escaped."""
        if not self.is_main:
            return
        step = record.trace["step"]
        self._trace.write(record.trace)
        for tokens, greedy in ((record.tokens, False), (record.greedy, True)):
            file = run_files.tokens_file(self._directory, step, greedy)
            try:
                if tokens is not None:
                    tokens.save(file)
            except (OSError, SafetensorError) as error:
                if not self._lacks_tokens:
                    logger.warning("%s has no step %d: %s", file.parent, step, error)
                self._lacks_tokens = True
        if record.completions:
            self._completions.write(*({"step": step, **line} for line in record.completions))
        for i in record.shown:
            line = record.completions[i]
            scores = " ".join(_spell(line[key]) for key in line if key.startswith("rewards/"))
            self.say(f"  {_text(line['prompt'])} -> {_text(line['completion'])}  [{scores}]")


def _text(turns: Any) -> str:
    """Return a string, or the last message of a chat (if there is one), shortened and escaped."""
    text = last_text(turns)
    if len(text) > 200:
        text = f"{text[:100]} ... {text[-95:]}"
    return repr(text)


def summarize(metrics: MetricsLine, *names: str) -> str:
    """Return as text the metrics that the run has, a reward with its sources if it has several."""
    parts = []
    for name in names:
        if metrics.get(name) is None:
            continue
        label = name.removeprefix("eval_").removesuffix("_reward")
        part = f"{label} {_spell(metrics[name])}"
        start = re.escape(name.removesuffix("reward"))
        pattern = re.compile(f"{start}rewards/(.*)/mean")
        sources = []
        for key, value in metrics.items():
            if source := pattern.fullmatch(key):
                sources.append(f"{source[1]} {_spell(value)}")
        if len(sources) > 1:
            part += f" ({', '.join(sources)})"
        parts.append(part)
    return "  ".join(parts)


def _spell(number: float | None) -> str:
    if number is None or math.isnan(number):
        return "-"
    return f"{number:.3f}"


def due(step: int, every: int, last: int = 0) -> bool:
    """Return whether something is due that happens every `every` steps (0: never) and at `last`."""
    return every > 0 and (step % every == 0 or step == last)
