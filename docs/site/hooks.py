"""mkdocs: the README is the home page, and files of the repository that pages link to are pages.

The documents are read in the repository as well, so their links lead to files of it. Here each such
file becomes a page below `code/`, a folder that has no README a list of its files, and the links
lead to these pages. So no link of the site leads out of it to the repository.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
HOME = "README.md"
LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?(\))")
FENCED = re.compile(r"^(```.*?^```[ \t]*$)", re.M | re.S)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".json": "json"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the home page, and a page for each file that is linked to, directly or over another."""
    docs = [f"docs/{f.src_uri}" for f in files if f.src_uri.endswith(".md")]
    files.append(File.generated(config, "index.md", abs_src_path=str(ROOT / HOME)))
    seen = {HOME, *docs}
    todo = [*seen, "CONTRIBUTING.md"]
    while todo:
        path = todo.pop()
        if site_uri(path).startswith("code/"):
            files.append(_page_of(config, path))
        if path.endswith(".md"):
            new = {target for target in links(path) if target not in seen}
            todo += sorted(t for t in new if not t.startswith("docs/"))
            seen |= new
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Returns the text with links that lead to the site's pages."""
    path = repository_path(page.file.src_uri)
    if not path.endswith(".md"):
        return markdown
    here = posixpath.dirname(page.file.src_uri)

    def turned(match: re.Match[str]) -> str:
        target = resolved(path, match[2])
        if target is None:
            return match[0]
        return f"{match[1]}{posixpath.relpath(site_uri(target), here or '.')}{match[3] or ''})"

    parts = FENCED.split(markdown)
    return "".join(p if p.startswith("```") else LINK.sub(turned, p) for p in parts)


def links(path: str) -> Iterator[str]:
    """Yields the files of the repository that a document of it links to."""
    for part in FENCED.split((ROOT / path).read_text()):
        for match in LINK.finditer("" if part.startswith("```") else part):
            target = resolved(path, match[2])
            if target is not None:
                yield target


def resolved(path: str, link: str) -> str | None:
    """Returns the file or folder of the repository that a link means; None: it is none of it."""
    if "://" in link:
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    there = ROOT / target
    if target.startswith("..") or not there.exists():
        return None
    return f"{target}/README.md" if (there / "README.md").is_file() else target


def site_uri(path: str) -> str:
    """Returns the source of the page that a file of the repository is."""
    if path == HOME:
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"code/{path}" if path.endswith(".md") else f"code/{path}.md"


def repository_path(uri: str) -> str:
    """Returns the file of the repository that a page's source is."""
    if uri == "index.md":
        return HOME
    if not uri.startswith("code/"):
        return f"docs/{uri}"
    path = uri.removeprefix("code/")
    return path if (ROOT / path).is_file() else path.removesuffix(".md")


def _page_of(config: MkDocsConfig, path: str) -> File:
    source = ROOT / path
    if path.endswith(".md"):
        return File.generated(config, site_uri(path), abs_src_path=str(source))
    if source.is_dir():
        names = sorted(f"{e.name}/" if e.is_dir() else e.name for e in source.iterdir())
        body = "\n".join(f"* `{n}`" for n in names if not n.startswith(("__pycache__", ".")))
    else:
        body = f"````{LANGUAGES.get(source.suffix, 'text')}\n{source.read_text()}\n````"
    head = f"---\ntitle: {path}\nsearch:\n  exclude: true\n---\n"
    return File.generated(config, site_uri(path), content=f"{head}# `{path}`\n\n{body}\n")
