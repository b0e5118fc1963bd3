"""What the site does beyond mkdocs: pages from files outside of docs/, a check of every link in what was built.

A page's links are those of the repository: they work in an editor as they do on the site. One to a page of the site
stays a link to that page; one to another file of the repository, such as a module, leads to a page that shows it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
FROM_ROOT = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
"""Files of the repository's root that are pages, and where; the navigation has the first."""
ORIGIN = {page: f"{origin}" for origin, page in FROM_ROOT.items()}

LINK = re.compile(r"(?P<before>\]\()(?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?(?P<after>[^)]*\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages whose files are outside of docs/, and those that show source files."""
    for origin, uri in FROM_ROOT.items():
        inclusion = InclusionLevel.UNDEFINED if uri == "index.md" else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, uri, content=(ROOT / origin).read_text(), inclusion=inclusion))
    shown = {path for file in files.documentation_pages() for path in _source_files(file)}
    for path in sorted(shown):
        page = File.generated(config, _source_page(path), content=_as_page(path), inclusion=InclusionLevel.NOT_IN_NAV)
        files.append(page)
    return files


def _origin(uri: str) -> str:
    """Where in the repository the page is."""
    return ORIGIN.get(uri, f"docs/{uri}")


def _links(markdown: str, uri: str) -> Iterator[tuple[re.Match[str], str]]:
    """The relative links of a page, and what of the repository each leads to."""
    for match in LINK.finditer(markdown):
        target = match["target"]
        if not urlsplit(target).scheme:
            yield match, posixpath.normpath(posixpath.join(posixpath.dirname(_origin(uri)), target))


def _source_files(file: File) -> Iterator[str]:
    for _, path in _links(file.content_string, file.src_uri):
        if not path.startswith("docs/") and path not in FROM_ROOT and (ROOT / path).is_file():
            yield path


def _source_page(path: str) -> str:
    return f"source/{path}.md"


def _as_page(path: str) -> str:
    language = {"py": "python", "toml": "toml", "yaml": "yaml", "ipynb": "json"}.get(path.rpartition(".")[2], "text")
    text = (ROOT / path).read_text()
    return f"---\ntitle: {path}\nsearch:\n  exclude: true\n---\n\n# {path}\n\n````{language}\n{text}````\n"


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links of the repository into links of the site."""
    uri = page.file.src_uri
    if uri.startswith("source/"):
        return markdown
    lead = {match.start(): path for match, path in _links(markdown, uri)}

    def replaced(match: re.Match[str]) -> str:
        path = lead.get(match.start())
        if path is None:
            return match[0]
        target = path.removeprefix("docs/") if path.startswith("docs/") else FROM_ROOT.get(path, _source_page(path))
        relative = posixpath.relpath(target, posixpath.dirname(uri) or ".")
        return f"{match['before']}{relative}{match['anchor'] or ''}{match['after']}"

    return LINK.sub(replaced, markdown)


class _Seen(HTMLParser):
    """What a built page defines, leads to and shows."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.leads_to: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value is not None}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        names = {"a": "href", "link": "href", "img": "src", "script": "src", "source": "src"}
        if (name := names.get(tag)) in given:
            self.leads_to.add(given[name])


def on_post_build(config: MkDocsConfig) -> None:
    """Fails if a link, an anchor, a picture or a script of any built page leads nowhere."""
    site = Path(config.site_dir)
    seen: dict[Path, _Seen] = {}
    for path in site.rglob("*.html"):
        if path.name != "404.html":  # Served from anywhere, so its links begin at the server's root.
            seen[path] = _Seen()
            seen[path].feed(path.read_text())
    wrong = sorted(
        f"{path.relative_to(site)}: {target}" for path, page in seen.items() for target in _wrong(path, page, seen)
    )
    if wrong:
        raise PluginError("links that lead nowhere:\n  " + "\n  ".join(wrong))


def _wrong(path: Path, page: _Seen, seen: dict[Path, _Seen]) -> Iterator[str]:
    for target in page.leads_to:
        parts = urlsplit(target)
        if parts.scheme in ("http", "https", "mailto", "javascript", "data"):
            continue
        to = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        if to.is_dir():
            to /= "index.html"
        if not to.is_file() or (parts.fragment and to in seen and unquote(parts.fragment) not in seen[to].ids):
            yield target
