# SPDX-License-Identifier: MIT
"""Look at every page of the built documentation in headless Chromium, at two widths, light and dark.

Nothing but code may scroll sideways, every picture has an alternative text and no light box around it on a dark page,
text stands out from what is behind it, and the search shows first what newcomers look for. A page with planted faults
shows that they are found. Without Chromium nothing is checked, and that is said.

    python docs/check_pages.py docs/_build/html
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import search_words

SEARCHES = [(word, page) for page, words in search_words.WORDS.items() for word in words]
WIDTHS, THEMES = (1366, 360), ("light", "dark")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
LOOKER = Path(__file__).with_name("check_pages.js")
FIRST, FAULTY, LONGEST = "/check", "faulty", 600  # what looks at the others, what has faults, and seconds for all
PLANTED = """<body style="background: #fff; width: 3000px"><article>
<div style="overflow-x: auto; width: 300px"><table><td style="min-width: 3000px">wide</td></table></div>
<p style="color: #eee">pale</p><code style="opacity: 0.1"><span>faded</span></code>
<pre style="overflow-x: auto; width: 40px">x = "a long line of code"</pre>
<img src="/_static/hero-light.svg"><img src="/nowhere.png" alt="nothing">
</article></body>"""
PLANTED_SEARCH = ("plot", "nowhere")
PLANTED_FAULTS = (
    "the page is 30",
    "scroll sideways",
    "code is cut",
    'p "pale"',
    'span "faded"',
    "no alternative text",
    "no picture",
    "the theme is not dark",
    "before /nowhere.html",
)
SKIPPED = {"genindex.html", "search.html", "py-modindex.html"}


class Site(SimpleHTTPRequestHandler):
    """Serve the documentation, the page that looks at it, and take what it has found."""

    found: list[dict[str, Any]]
    done: threading.Event
    pages: list[str]

    def do_GET(self) -> None:
        """Serve a file, the page that looks at the others, or the one with planted faults."""
        if self.path not in {FIRST, f"/{FAULTY}"}:
            super().do_GET()
            return
        settings = json.dumps(
            {
                "pages": [FAULTY, *self.pages],
                "widths": WIDTHS,
                "themes": THEMES,
                "searches": [*SEARCHES, PLANTED_SEARCH],
            }
        )
        looker = f"<body><script>const settings = {settings};{LOOKER.read_text(encoding='utf-8')}</script></body>"
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write((looker if self.path == FIRST else PLANTED).encode())

    def do_POST(self) -> None:
        """Take what was found."""
        self.found.extend(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()
        self.done.set()

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


class Server(ThreadingHTTPServer):
    """A server that says nothing of pages that the browser left before they were sent."""

    def handle_error(self, *_: Any) -> None:
        """Log nothing."""


def look(browser: str, folder: Path) -> list[dict[str, Any]]:
    """Return what is wrong with the pages in a folder.

    Raises
    ------
    TimeoutError
        If the browser does not answer.
    """
    files = (path.relative_to(folder).as_posix() for path in folder.rglob("*.html"))
    Site.pages = sorted(name for name in files if name not in SKIPPED and not name.startswith("_static/"))
    Site.found, Site.done = [], threading.Event()
    with (
        Server(("127.0.0.1", 0), partial(Site, directory=str(folder))) as server,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--window-size=1500,900"]
        address = f"http://127.0.0.1:{server.server_port}{FIRST}"
        process = subprocess.Popen(
            [browser, *flags, "--remote-debugging-port=0", address],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        answered = Site.done.wait(LONGEST)
        process.kill()
        process.wait()
        server.shutdown()
    if not answered:
        msg = f"{browser} had not looked at {len(Site.pages)} pages after {LONGEST} seconds"
        raise TimeoutError(msg)
    return Site.found


def main() -> int:
    """Print what is wrong, and return 1 if anything is."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the built pages are")
    folder = parser.parse_args().folder.resolve()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"No page was looked at: none of {', '.join(BROWSERS)} is installed.")
        return 0
    everything = look(browser, folder)
    planted = [one["what"] for one in everything if one["page"] == FAULTY or "/nowhere" in one["what"]]
    missed = [fault for fault in PLANTED_FAULTS if not any(fault in what for what in planted)]
    found = [one for one in everything if one["page"] != FAULTY and "/nowhere" not in one["what"]]
    found += [{"page": FAULTY, "how": "planted", "what": f"'{fault}' was not found"} for fault in missed]
    for one in found:
        print("{page}, {how}: {what}".format(**one))
    print(f"{len(Site.pages)} pages at {len(WIDTHS)} widths, in {len(THEMES)} themes: {len(found)} faults")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
