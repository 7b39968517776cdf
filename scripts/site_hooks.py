"""Hooks of mkdocs that make the site from docs/, whose pages are written for GitHub.

* The navigation is docs/README.md, which lists every page by task.
* A link to a file outside docs/ leads to the repository. A link to a missing file ends the build.
* Lists get the indentation that mkdocs' Markdown asks for; CommonMark allows less.
"""

import re
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

import mdformat
from markdown import Markdown
from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor
from markdown.util import AtomicString
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify
from pymdownx.superfences import fence_code_format

ROOT = Path(__file__).parents[1]
INDEX = "README.md"
"""Page of a folder that lists the other pages."""


def navigation(docs: Path, repository: str) -> list[dict[str, Any]]:
    """Return the sections of docs/README.md with the pages of their tables."""
    sections: list[dict[str, Any]] = [{"Home": INDEX}]
    for section in (docs / INDEX).read_text(encoding="utf-8").split("\n## ")[1:]:
        title, _, rest = section.partition("\n")
        cells = [line.split("|")[1] for line in rest.splitlines() if line.startswith("| ")]
        links = [link for cell in cells for link in re.findall(r"\[([^\]]+)\]\(([^)#]+)\)", cell)]
        sections.append({title: [_entry(docs, repository, name.replace("`", ""), path) for name, path in links]})
    return sections


def _entry(docs: Path, repository: str, name: str, path: str) -> dict[str, Any]:
    """Return a page, a folder with all its pages, or the address of a file of the repository."""
    page = (docs / path).resolve()
    if not page.is_relative_to(docs):
        return {name: address(page, repository)}
    if page.parent == docs:
        return {name: path}
    pages = sorted(page.parent.glob("*.md"), key=lambda one: (one != page, one.name))
    return {name: [one.relative_to(docs).as_posix() for one in pages]}


def address(file: Path, repository: str) -> str:
    """Return the address of a file or folder of the repository.

    Raises:
        PluginError: it does not exist.
    """
    if not (file.exists() and file.is_relative_to(ROOT)):
        raise PluginError(f"{file} does not exist: correct the link that leads to it")
    kind = "tree" if file.is_dir() else "blob"
    return f"{repository}/{kind}/main/{file.relative_to(ROOT).as_posix()}"


class Outward(Treeprocessor):
    """Rewriter of links to files outside docs/, before mkdocs looks for them inside."""

    def __init__(self, docs: Path, repository: str) -> None:
        super().__init__()
        self._docs, self._repository = docs, repository
        self.page = docs / INDEX

    def run(self, root: Element) -> None:
        """Rewrite the links of the current page, and unescape `|` in code within tables."""
        for code in (code for cell in root.iter("td") for code in cell.iter("code")):
            code.text = AtomicString((code.text or "").replace("\\|", "|"))
        for link in root.iter("a"):
            path, hash_, anchor = link.get("href", "").partition("#")
            if not path or "://" in path or path.startswith("mailto:"):
                continue
            file = (self.page.parent / path).resolve()
            if not file.is_relative_to(self._docs):
                link.set("href", address(file, self._repository) + hash_ + anchor)


class OutwardExtension(Extension):
    """Extension that adds `Outward` to Markdown."""

    def __init__(self, outward: Outward) -> None:
        super().__init__()
        self.outward = outward

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802 - Markdown's own name
        """Let `outward` run after Markdown's inline patterns (priority 20) and before mkdocs' links (0)."""
        md.treeprocessors.register(self.outward, "outward", 10)


_outward: Outward


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the options that a YAML file cannot express."""
    global _outward
    docs, repository = Path(config.docs_dir).resolve(), str(config.repo_url).rstrip("/")
    _outward = Outward(docs, repository)
    config.nav = navigation(docs, repository)
    config.markdown_extensions.append(OutwardExtension(_outward))
    config.mdx_configs["toc"] = {"slugify": slugify(case="lower"), "permalink": True}
    diagrams = {"name": "mermaid", "class": "mermaid", "format": fence_code_format}
    config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [diagrams]}
    return config


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Indent lists as mkdocs' Markdown requires, and tell `Outward` which page it gets next."""
    _outward.page = Path(config.docs_dir).resolve() / page.file.src_uri
    return mdformat.text(markdown, options={"wrap": "keep"}, extensions={"mkdocs", "tables"})
