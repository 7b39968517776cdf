"""Read the built site in a real browser, as a newcomer does.

    python scripts/site_check.py dist/site /usr/bin/chromium      # `make docs-check` does it

Print a line for each check, and exit with 1 if one failed. The site is served on loopback and no other host can be
reached, so a page that needs one fails.
"""

import html
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from markdown_it import MarkdownIt
from playwright.sync_api import BrowserContext, Error, Page, expect, sync_playwright

DOCS = Path(__file__).parents[1] / "docs"
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
TASKS = ("Install", "Run a first service", "Choose a dtype", "Judge accuracy", "Operate", "Extend")
EVERY = 24
"""Check only every 24th page at a phone's width, because each takes seconds on a busy machine."""
PATIENCE_MS = 60_000
"""Longest wait in milliseconds. It only ends a check that hangs."""


class Fault(Exception):
    """Difference between the site and what a reader needs."""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def served(site: Path) -> Iterator[str]:
    """Serve a folder on a free port of loopback while the block runs, and yield its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


def check_navigation(page: Page, home: str) -> None:
    """Find every task in the sidebar, and open a page by a click."""
    page.goto(home)
    sidebar = page.locator(".md-sidebar--primary")
    for task in TASKS:
        expect(sidebar.locator("label", has_text=task).first).to_be_visible()
    sidebar.locator("label", has_text="Operate").first.click()
    sidebar.locator("a[href='canary/']").click()
    page.wait_for_url("**/canary/")
    expect(page.locator("article h1")).to_be_visible()


def check_search(page: Page, home: str) -> None:
    """Search for "rollback", and open a page with the word marked."""
    page.goto(home)
    page.locator(".md-search__input").click()
    page.locator(".md-search__input").fill("rollback")
    first = page.locator(".md-search-result__item a").first
    expect(first).to_be_visible()
    first.click()
    page.wait_for_url("**h=*")
    expect(page.locator("article mark").first).to_be_attached()


def check_copy(page: Page, home: str) -> None:
    """Copy the commands of a code block by its button."""
    page.goto(f"{home}quickstart/")
    block = page.locator("article .highlight").first
    block.hover()
    block.locator("button[data-clipboard-target], .md-clipboard, .md-code__button").first.click()
    copied = page.evaluate("navigator.clipboard.readText()")
    shown = block.locator("code").inner_text()
    if copied.strip() != shown.strip():
        raise Fault(f"copied {copied!r} of {shown!r}")


def check_pictures(page: Page, home: str, paths: list[str]) -> None:
    """Draw every picture of every page."""
    for path in paths:
        page.goto(home + path)
        broken = page.evaluate(
            "Promise.all([...document.images].map(i => i.decode().then(() => '', () => i.src)))"
            ".then(all => all.filter(one => one))"
        )
        if broken:
            raise Fault(f"{path}: {broken}")


def check_phone(page: Page, home: str, paths: list[str]) -> None:
    """Read pages at the width of a phone, and open the menu there."""
    page.set_viewport_size(PHONE)
    for path in paths:
        page.goto(home + path)
        width = page.evaluate("document.documentElement.scrollWidth")
        if width > PHONE["width"]:
            raise Fault(f"{path} is {width} pixels wide, and the phone's screen {PHONE['width']}")
    page.goto(home)
    page.locator("label.md-header__button[for=__drawer]").click()
    expect(page.locator(".md-sidebar--primary label", has_text="Operate").first).to_be_in_viewport()


def check_text(site: Path) -> None:
    """Compare the text of every page with that of CommonMark, which GitHub shows."""
    reader = MarkdownIt("commonmark").enable("table")
    for source in DOCS.rglob("*.md"):
        target = site / source.relative_to(DOCS).with_suffix("")
        built = ((target.parent if source.name == "README.md" else target) / "index.html").read_text(encoding="utf-8")
        article = built.partition("<article")[2].partition(">")[2].partition("</article>")[0]
        if _words(reader.render(source.read_text(encoding="utf-8"))) != _words(article):
            raise Fault(str(source))


def _words(markup: str) -> str:
    """Return the text of HTML without white space, the theme's buttons and the marks of headings."""
    buttons = r'<a [^>]*class="md-content__button.*?</a>|<aside class="md-source-file.*'
    text = re.sub(r"<[^>]+>", "", re.sub(buttons, "", markup, flags=re.DOTALL))
    return re.sub(r"[\s¶]+", "", html.unescape(text))


def checks(site: Path, context: BrowserContext, home: str) -> Iterator[str]:
    """Run all checks, and yield the faults."""
    paths = sorted(f"{one.parent.relative_to(site).as_posix()}/".removeprefix("./") for one in site.rglob("index.html"))
    articles = {
        path: (site / path / "index.html").read_text(encoding="utf-8").partition("<article")[2] for path in paths
    }
    pictured = [path for path, article in articles.items() if "<img" in article]
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    for check in (
        partial(check_text, site),
        partial(check_navigation, page, home),
        partial(check_search, page, home),
        partial(check_copy, page, home),
        partial(check_pictures, page, home, pictured),
        partial(check_phone, page, home, paths[::EVERY]),
    ):
        told = (check.func.__doc__ or "").strip()
        try:
            check()
        except (AssertionError, Error, Fault) as error:
            print(f"FAILED {told}", flush=True)
            yield str(error)
        else:
            print(f"ok     {told}", flush=True)


def main() -> int:
    """Run the command line and return the exit status."""
    site, browser = Path(sys.argv[1]), sys.argv[2]
    expect.set_options(timeout=PATIENCE_MS)
    with served(site) as home, sync_playwright() as driver:
        # Chromium needs no sandbox for pages of our own, and root may not have one.
        started = driver.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        context = started.new_context(viewport=DESK, permissions=["clipboard-read", "clipboard-write"])
        context.route(lambda address: not address.startswith(home), lambda route: route.abort())
        faults = list(checks(site, context, home))
        started.close()
    print(*faults, sep="\n", file=sys.stderr)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
