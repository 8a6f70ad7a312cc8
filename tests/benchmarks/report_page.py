"""How fast a report opens: 1,000 steps and 10,000 completions in headless Chromium.

    python -m tests.benchmarks.report_page [--out DIRECTORY] [--steps 1000] [--completions 10000]

It makes up a run, writes its report, opens it from disk and presses keys; it prints seconds, and
writes screenshots.
"""

import argparse
import time
from pathlib import Path

from rlhf_pg.report.run_page import write_report
from tests.report.browser import Page, page
from tests.report.synthetic import make_run

PAINTED = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))"
PRESS = """new Promise(done => {
  const begun = performance.now();
  document.body.dispatchEvent(new KeyboardEvent("keydown", {key: "%s", bubbles: true}));
  requestAnimationFrame(() => setTimeout(() => done(performance.now() - begun)));
})"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("reports/page"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--completions", type=int, default=10_000)
    options = parser.parse_args()
    run = options.out / "run"
    logged = 50
    prompts = max(1, options.completions // (8 * logged))
    make_run(run, options.steps, max(1, options.steps // logged), prompts, 8, (50, 300))
    begun = time.perf_counter()
    report = write_report(run)
    print(f"written in {time.perf_counter() - begun:.2f} s, {report.stat().st_size / 1e6:.1f} MB")
    with page() as opened:
        measure(opened, report, options.out)


def measure(opened: Page, report: Path, out: Path) -> None:
    """Open a report, press keys, and print how long each took."""
    address = report.absolute().as_uri()
    for attempt in ("cold", "warm"):
        print(f"open, {attempt}: {opened.open(address):.2f} s until its curves are drawn")
    opened.screenshot(out / "curves.png")
    opened.wait("document.readyState === 'complete'")
    loaded = opened.run(
        "performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd / 1000"
    )
    print(f"all of the file read: {loaded:.2f} s")
    begun = time.perf_counter()
    opened.press("t")
    opened.wait("document.querySelectorAll('.mate .text > span').length > 0")
    opened.run(PAINTED)
    print(f"token view, opened: {time.perf_counter() - begun:.2f} s")
    opened.screenshot(out / "tokens.png")
    for key in "erkv":
        print(f"key {key}: {opened.run(PRESS % key):.0f} ms until painted")
    print(f"key ArrowDown: {opened.run(PRESS % 'ArrowDown'):.0f} ms until painted")
    opened.screenshot(out / "values.png")
    others = [url for url in opened.requests if url != address and not url.startswith("data:")]
    print(f"requests beside the file: {others or 'none'}")
    print(f"complaints: {opened.complaints or 'none'}")


if __name__ == "__main__":
    main()
