"""Looks at the built site in headless Chromium: python docs/site/look.py site [--pictures FOLDER]

Every page is opened from its file, wide and narrow, light and dark. It fails if a page scrolls sideways, shows a broken
picture, logs an error, or asks for anything that is not a file; and if a search finds nothing.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WIDTHS = (1440, 390)
SCHEMES = ("light", "dark")
PICTURED = ("index.html", "choose.html", "limits.html", "api/chains.html", "reports/loops.html")

WRONG = """(async () => {
  const wrong = [];
  const page = document.scrollingElement;
  if (page.scrollWidth > innerWidth) {
    const wide = [...document.querySelectorAll('.md-content *')]
      .filter(one => one.getBoundingClientRect().right > innerWidth).slice(0, 3);
    wrong.push(`is ${page.scrollWidth} pixels wide of ${innerWidth}: ${wide.map(one => one.outerHTML.slice(0, 80))}`);
  }
  for (const image of document.images) {
    image.loading = 'eager';
    await image.decode().catch(() => {});
    if (!image.naturalWidth) wrong.push(`broken picture ${image.src}`);
  }
  return wrong;
})()"""

SEARCH = """(async () => {
  document.querySelector('[for=__search]').click();
  const query = document.querySelector('[data-md-component=search-query]');
  query.focus();
  query.value = %s;
  for (const kind of ['input', 'change', 'keyup']) query.dispatchEvent(new Event(kind, {bubbles: true}));
  for (let tries = 0; tries < 100; ++tries) {
    await new Promise(wake => setTimeout(wake, 100));
    const found = document.querySelectorAll('.md-search-result__item a');
    if (found.length) return [...found].slice(0, 5).map(one => one.getAttribute('href'));
  }
  return [];
})()"""


class Browser:
    """Chromium, told what to do by its debugging protocol over two pipes."""

    def __init__(self, to: Any, answers: Any) -> None:
        self._to = to
        self._answers = answers
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self._unread = b""
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """What a method of the protocol answers; events that come meanwhile are kept."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while (answer := self._read()).get("id") != number:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def wait(self, event: str) -> None:
        """Until an event has come."""
        while not any(one.get("method") == event for one in self.events):
            self.events.append(self._read())

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"].get("description"))
        return found["result"].get("value")

    def open_tab(self) -> None:
        """A page, with its errors and requests among the events."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def show(self, page: Path, *, width: int, scheme: str) -> list[str]:
        """Open a page, and say what is wrong with it."""
        self.events.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=page.as_uri())
        self.wait("Page.loadEventFired")
        wrong: list[str] = self.evaluate(WRONG)
        if self.evaluate("document.body.dataset.mdColorScheme") != {"light": "default", "dark": "slate"}[scheme]:
            wrong.append("has the other colours")
        return wrong + self.complaints()

    def complaints(self) -> list[str]:
        """Errors, and requests that are not for files, since a page was opened."""
        found = []
        for event in self.events:
            params = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(f"raises {params['exceptionDetails'].get('text')}")
            if event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(f"logs {params['entry']['text']} {params['entry'].get('url', '')}")
            if event.get("method") == "Network.requestWillBeSent":
                url = params["request"]["url"]
                if not url.startswith(("file:", "data:", "blob:", "about:")):
                    found.append(f"asks for {url}")
        return found

    def picture(self, path: Path, *, whole: bool) -> None:
        """A picture of the page as it is, or of the whole length of it."""
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(taken["data"]))

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            piece = self._answers.read1(1 << 16)
            if not piece:
                raise RuntimeError("the browser has ended")
            self._unread += piece
        message, _, self._unread = self._unread.partition(b"\0")
        read: dict[str, Any] = json.loads(message)
        return read


@contextmanager
def browser(program: str) -> Iterator[Browser]:
    """Chromium without a window, whose profile is thrown away."""
    its_in, to_fd = os.pipe()
    from_fd, its_from = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]
        quiet = ["--disable-background-networking", "--disable-component-update", f"--user-data-dir={profile}"]

        def as_3_and_4() -> None:
            kept = os.dup(its_in), os.dup(its_from)
            os.dup2(kept[0], 3)
            os.dup2(kept[1], 4)

        process = subprocess.Popen(
            [program, *options, *quiet],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=as_3_and_4,  # noqa: PLW1509 (this program has one thread)
            close_fds=False,
        )
        os.close(its_in)
        os.close(its_from)
        try:
            with os.fdopen(to_fd, "wb") as to, os.fdopen(from_fd, "rb") as answers:
                started = Browser(to, answers)
                started.open_tab()
                yield started
        finally:
            process.terminate()
            process.wait(10)


def look(site: Path, pictures: Path | None, program: str) -> list[str]:
    """What is wrong with the pages of ``site``."""
    pages = sorted(page for page in site.rglob("*.html") if page.name != "404.html")
    wrong = []
    with browser(program) as chromium:
        for width, scheme in itertools.product(WIDTHS, SCHEMES):
            for page in pages:
                name = page.relative_to(site).as_posix()
                found = chromium.show(page.resolve(), width=width, scheme=scheme)
                wrong += [f"{name} ({width}, {scheme}) {one}" for one in found]
                if pictures is not None and name in PICTURED:
                    stem = f"{name.removesuffix('.html').replace('/', '-')}-{width}-{scheme}"
                    chromium.picture(pictures / f"{stem}.png", whole=False)
        for words in ("PowerSGD", "uneven inputs", "OverlappedOptimizer"):
            wrong += chromium.show((site / "index.html").resolve(), width=1440, scheme="light")
            if not (found := chromium.evaluate(SEARCH % json.dumps(words))):
                wrong.append(f"a search for {words!r} finds nothing")
            print(f"{words}: {', '.join(found)}")
            wrong += chromium.complaints()
        if pictures is not None:
            time.sleep(0.5)
            chromium.picture(pictures / "search.png", whole=False)
    print(f"{len(pages)} pages, {len(WIDTHS)} widths, {len(SCHEMES)} colours: {len(wrong)} faults")
    return wrong


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path, help="the folder that `make docs` wrote")
    parser.add_argument("--pictures", type=Path, help="folder for pictures of some pages")
    parser.add_argument("--browser", default="chromium", help="its program")
    options = parser.parse_args()
    if (program := shutil.which(options.browser)) is None:
        parser.error(f"{options.browser} is not there: apt-get install chromium, or --browser")
    if options.pictures is not None:
        options.pictures.mkdir(parents=True, exist_ok=True)
    wrong = look(options.site, options.pictures, program)
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
