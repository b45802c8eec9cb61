"""What MkDocs calls while it builds the site: pages from outside of docs/, and a look at what is fetched."""

from __future__ import annotations

import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

__all__ = ["fetched", "on_config", "on_files", "on_page_markdown", "on_post_build", "on_post_page"]

ROOT = Path(__file__).parents[2]
OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md")
"""Pages in the root of the repository, where people look for them, that belong to the site as well."""
NOTEBOOK = "examples/notebook.ipynb"
MODEL = "examples/demo/model.py"
PROGRAMS = ("examples/*.py", "examples/booster_plugins/*.py", MODEL)
LONG = 38
"""Names in tables with more letters may break on wide screens, too."""
FETCHES = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href", "use": "href"}


def _programs() -> list[Path]:
    """The paths of the examples in the repository."""
    return [path.relative_to(ROOT) for pattern in PROGRAMS for path in sorted(ROOT.glob(pattern))]


def on_config(config: Any, **_: Any) -> Any:
    """Show the version in the header, unless it has a selector of versions."""
    if not config.extra["version"]["provider"]:
        version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
        config.site_name += f" {version}"
    return config


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add the pages from outside of docs/, and a page for each example."""
    for name in (*OUTSIDE, NOTEBOOK):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    for name in _programs():
        code, link = (ROOT / name).read_text("utf-8"), f"[examples]({'../' * (len(name.parts) - 1)}examples.md)"
        needs = "Copy [demo/model.py](demo/model.md), too: the program imports it." if "from demo.model" in code else ""
        head = f"---\nhide: [toc]\n---\n\n# {name.name}\n\n`{name}` is one of the {link}. {needs}\n\n"
        page = f"{head}```python\n{code}```\n"
        files.append(File.generated(config, str(name.with_suffix(".md")), content=page))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Make links between docs/ and the root right in the site, too; leave the pages on internals out of the search."""
    uri = page.file.src_uri
    page.meta.setdefault("description", _description(markdown))
    page.meta["search"] = {"exclude": True} if uri.startswith("inside/") else {"boost": _boost(uri)}
    if page.file.src_uri in OUTSIDE:
        return markdown.replace("](docs/", "](")
    markdown = re.sub(r"\]\(\.\./(examples/[\w/]+)\.py\)", r"](\1.md)", markdown)
    markdown = markdown.replace(f"](../{NOTEBOOK})", f"]({NOTEBOOK})")
    return re.sub(rf"\]\(\.\./((?:\.\./)?(?:{'|'.join(map(re.escape, OUTSIDE))}))", r"](\1", markdown)


def on_post_page(output: str, **_: Any) -> str:
    """Let names in tables break after a dot or an underscore: short ones on narrow screens only (style.css)."""

    def name(match: re.Match[str]) -> str:
        mark = "<wbr>" if len(match[1]) > LONG else "<wbr class=narrow>"
        return f"<code>{re.sub(r'(?<=[._(/=])(?=[a-zA-Z])', mark, match[1])}</code>"

    return re.sub(r"(?s)<td\b.*?</td>", lambda cell: re.sub(r"<code>([^<>]+)</code>", name, cell[0]), output)


def _description(markdown: str) -> str:
    """Return the first paragraph without markup, for search engines and link previews."""
    text = next((part for part in markdown.split("\n\n") if part[:1].isalnum() or part[:1] in ("`", "[", "*")), "")
    return " ".join(re.sub(r"[*`]", "", re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", text)).split())


def _boost(uri: str) -> float:
    """How high the search ranks a page: the guides, then the reference, at last tables of names and examples."""
    last = ("examples/", "porting-", "architecture", "checkpoint-format", "reference/index", *OUTSIDE)
    rare = ("index", "benchmarks", "versions", "booster-plugins", "deepspeed-", "disk", "lightning-", "pipelines")
    rare += ("shardformer", "sharded-model")
    boosts = {last: 1e-3, rare: 0.5, ("reference/",): 0.7, ("troubleshooting",): 2, ("command-line",): 2.5}
    return next((boost for pages, boost in boosts.items() if uri.startswith(pages)), 1)


class _Fetches(HTMLParser):
    """The addresses that a browser asks for by itself when it shows a page; links that a reader may follow are none."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "link" and given.get("rel") in ("canonical", "prev", "next"):
            return
        address = given.get(FETCHES.get(tag, "")) or ""
        if re.match(r"(\w+:)?//", address):
            self.found.append(address)


def fetched(html: str) -> list[str]:
    """What a browser would fetch from elsewhere to show ``html``."""
    parser = _Fetches()
    parser.feed(html)
    return parser.found


def on_post_build(config: Any, **_: Any) -> None:
    """The site that was written asks nobody for anything.

    Raises:
        PluginError: a page does; says which one, and for what.
    """
    for path in sorted(Path(config.site_dir).rglob("*.html")):
        if away := fetched(path.read_text("utf-8")):
            raise PluginError(f"{path} fetches {', '.join(away)}: the site has to be whole by itself")
    for path in sorted(Path(config.site_dir).rglob("*.css")):
        if away := re.findall(r"url\(\s*['\"]?((?:https?:)?//[^)'\"]+)", path.read_text("utf-8")):
            raise PluginError(f"{path} fetches {', '.join(away)}: the site has to be whole by itself")
