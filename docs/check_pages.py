# SPDX-License-Identifier: MIT
"""Check every page of the built documentation in headless Chromium, at two widths, light and dark.

Only code may scroll sideways. Every picture has an alternative text, and no light box around it on
a dark page. Text contrasts with its background, and the search first shows the pages that newcomers
look for. A page with planted faults must fail. Without Chromium nothing is checked, and a message
says so.

    python docs/check_pages.py docs/_build/html
"""

from __future__ import annotations

import html
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import search_words

SEARCHES = [(word, page) for page, words in search_words.WORDS.items() for word in words]
WIDTHS, THEMES = (1366, 360), ("light", "dark")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
LOOKER = Path(__file__).with_name("check_pages.js")
# The page with planted faults, and the seconds for all pages.
FAULTY, LONGEST = "faulty", 600
PLANTED = {
    "the theme is not dark": '<body style="background: #fff">',
    "the page is 30": '<div style="width: 3000px">wide</div>',
    "scroll sideways": (
        '<div style="overflow-x: auto; width: 300px"><p style="width: 3000px">wide</p></div>'
    ),
    "code is cut": '<pre style="overflow-x: auto; width: 40px">x = "a long line of code"</pre>',
    'p "pale"': '<p style="color: #eee">pale</p>',
    'span "faded"': '<code style="opacity: 0.1"><span>faded</span></code>',
    "no alternative text": '<img src="/_static/hero-light.svg">',
    "no picture": '<img src="/nowhere.png" alt="nothing">',
    # The search must not find this page.
    f"before /{FAULTY}.html": "",
}
SKIPPED = {"genindex.html", "search.html", "py-modindex.html"}


def look(browser: str, folder: Path, pages: list[str]) -> list[dict[str, Any]]:
    """Return the faults of the pages in a folder.

    Two pages are added to it: one checks all others, and one has faults.
    """
    settings = {
        "pages": [f"{FAULTY}.html", *pages],
        "widths": WIDTHS,
        "themes": THEMES,
        "searches": [*SEARCHES, ("plot", FAULTY)],
    }
    looker = (
        "<script>const settings = "
        f"{json.dumps(settings)};{LOOKER.read_text(encoding='utf-8')}</script>"
    )
    (folder / "look.html").write_text(
        f'<meta charset="utf-8"><body>{looker}</body>', encoding="utf-8"
    )
    (folder / f"{FAULTY}.html").write_text("".join(PLANTED.values()), encoding="utf-8")
    serve = [
        sys.executable,
        "-u",
        "-m",
        "http.server",
        "0",
        "--bind",
        "127.0.0.1",
        "--directory",
        str(folder),
    ]
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1500,900",
        f"--user-data-dir={folder}/.user",
    ]
    flags += ["--dump-dom", f"--virtual-time-budget={1000 * LONGEST}"]
    with subprocess.Popen(
        serve, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        try:
            address = server.stdout.readline().rpartition("(")[2].partition(")")[0]
            call = [browser, *flags, f"{address}look.html"]
            page = subprocess.run(
                call, capture_output=True, check=True, encoding="utf-8", timeout=LONGEST
            ).stdout
        finally:
            server.kill()
    return json.loads(html.unescape(page.partition("<body>")[2].rpartition("</body>")[0]))


def main(built: Path) -> int:
    """Print the faults, and return 1 if there are any."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"No page was looked at: none of {', '.join(BROWSERS)} is installed.")
        return 0
    files = (path.relative_to(built).as_posix() for path in built.rglob("*.html"))
    pages = sorted(
        name for name in files if name not in SKIPPED and not name.startswith("_static/")
    )
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as copy:
        everything = look(browser, Path(shutil.copytree(built, copy, dirs_exist_ok=True)), pages)
    planted = [one["what"] for one in everything if FAULTY in str(one)]
    found = [one for one in everything if FAULTY not in str(one)]
    missed = [fault for fault in PLANTED if not any(fault in what for what in planted)]
    found += [
        {"page": FAULTY, "how": "planted", "what": f"'{fault}' was not found"} for fault in missed
    ]
    for one in found:
        print("{page}, {how}: {what}".format(**one))
    print(
        f"{len(pages)} pages at {len(WIDTHS)} widths, in {len(THEMES)} themes: {len(found)} faults"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
