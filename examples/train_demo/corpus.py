"""Collect the demo model's training text from installed Debian packages and the Python library.

Writes one JSON-lines file a domain, each line ``{"id", "source", "split", "text"}``. A document is
a chapter, a page, a manual page or a source file; one in twenty goes to the held-out split, chosen
by a hash of its id, so that no document is in both.

    python corpus.py OUT_DIR
"""

from __future__ import annotations

import argparse
import concurrent.futures
import gzip
import hashlib
import html.parser
import json
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_ONE_IN = 20
MAX_FILE_BYTES = 200_000
DOC = Path("/usr/share/doc")

# domain -> the Debian packages that it is read from
PACKAGES = {
    "bible": ["bible-kjv"],
    "english": [
        "jargon-text", "debian-handbook", "debian-reference-en", "installation-guide-amd64",
        "debian-faq",
    ],
    "manual": ["manpages", "manpages-dev", "linux-libc-dev", "groff-base"],
    "german": [
        "debian-handbook", "debian-reference-de", "installation-guide-amd64", "debian-faq-de",
    ],
    "python": [],
}  # fmt: skip
DOMAINS = tuple(PACKAGES)

BOOKS = """Genesis Exodus Leviticus Numbers Deuteronomy Joshua Judges Ruth 1_Samuel 2_Samuel
1_Kings 2_Kings 1_Chronicles 2_Chronicles Ezra Nehemiah Esther Job Psalms Proverbs Ecclesiastes
Song_of_Solomon Isaiah Jeremiah Lamentations Ezekiel Daniel Hosea Joel Amos Obadiah Jonah Micah
Nahum Habakkuk Zephaniah Haggai Zechariah Malachi Matthew Mark Luke John Acts Romans 1_Corinthians
2_Corinthians Galatians Ephesians Philippians Colossians 1_Thessalonians 2_Thessalonians 1_Timothy
2_Timothy Titus Philemon Hebrews James 1_Peter 2_Peter 1_John 2_John 3_John Jude Revelation"""

# Typographic characters and what they become.
PLAIN = {
    0xA0: " ", 0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"', 0x201E: '"',
    0x2010: "-", 0x2011: "-", 0x2212: "-", 0xAD: None, 0x200B: None,
}  # fmt: skip

PYTHON_LEFT_OUT = {
    "encodings", "idlelib", "lib2to3", "test", "tests", "site-packages", "__pycache__",
    "ensurepip", "pydoc_data", "turtledemo", "config-3.11-x86_64-linux-gnu",
}  # fmt: skip


class CorpusError(Exception):
    """A source of text is missing or does not look as expected."""


@dataclass(frozen=True)
class Document:
    """One piece of free text, and where it came from."""

    id: str
    source: str
    text: str

    @property
    def split(self) -> str:
        """``train`` or ``heldout``: the same for a page in every language."""
        key = re.sub(r"[._/](de|en|de-DE|en-US)\b", "", self.id)
        digest = hashlib.sha256(key.encode()).digest()
        return "heldout" if digest[0] * 256 + digest[1] < 65536 // HELD_OUT_ONE_IN else "train"


class _TextOfHtml(html.parser.HTMLParser):
    """Keep the text of a page, with a line break at every block; skip navigation and scripts."""

    BLOCKS = frozenset(
        "p div h1 h2 h3 h4 h5 li tr pre dt dd table ul ol dl br section blockquote".split()
    )
    SKIPPED = frozenset("head script style nav footer".split())

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._skipping = 0
        self._verbatim = 0

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self._skipping += tag in self.SKIPPED
        self._verbatim += tag == "pre"
        if tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._skipping -= tag in self.SKIPPED
        self._verbatim -= tag == "pre"
        if tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._skipping:
            self.parts.append(data if self._verbatim else re.sub(r"\s+", " ", data))


def tidy(text: str) -> str:
    """Plain quotes and spaces, no trailing blanks, at most one empty line in a row."""
    text = text.translate(PLAIN)
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def html_to_text(page: str) -> str:
    """The readable text of an HTML page."""
    parser = _TextOfHtml()
    parser.feed(page)
    text = "".join(parser.parts)
    text = re.sub(r"\n +(?=\S)", "\n", re.sub(r"(?<=\S) {2,}(?=\S)", " ", text))
    return tidy(text)


def bible() -> Iterator[Document]:
    """Chapters of the King James Version, a verse a line, without verse numbers."""
    out = subprocess.run(
        ["bible", "-f", "gen1:1-rev22:21"], capture_output=True, text=True, check=True
    ).stdout
    books: dict[str, str] = {}
    names = iter(name.replace("_", " ") for name in BOOKS.split())
    chapters: dict[tuple[str, str], list[str]] = {}
    for line in out.splitlines():
        match = re.match(r"(\d?[A-Za-z]+)(\d+):\d+ (.*)", line)
        if match is None:
            raise CorpusError(f"`bible -f` printed a line that is no verse: {line[:80]!r}")
        short, chapter, verse = match.groups()
        if short not in books:
            books[short] = next(names)
        chapters.setdefault((books[short], chapter), []).append(verse.strip())
    for (book, chapter), verses in chapters.items():
        title = f"{book} {chapter}"
        yield Document(f"bible/{title}", "bible-kjv", f"{title}\n\n" + "\n".join(verses) + "\n")


def jargon() -> Iterator[Document]:
    """Entries of the Jargon File, forty to a document."""
    text = gzip.open(DOC / "jargon-text/jargon.txt.gz", "rt", errors="replace").read()
    text = tidy(re.sub(r"(?m)^   ", "", text))
    start = max(text.find("\nThe Jargon Lexicon"), 0)
    entries = re.split(r"\n(?=[^\s].{0,60}:? ?/?.*\n\n)", text[start:])
    for i in range(0, len(entries), 40):
        yield Document(f"jargon/{i:06d}", "jargon-text", tidy("\n".join(entries[i : i + 40])))


def _is_english(paragraph: str) -> bool:
    """Whether a paragraph of a translated page was left in English."""
    words = paragraph.lower().split()
    german = sum(w in {"der", "die", "das", "und", "ist", "zu", "den", "von", "mit"} for w in words)
    return sum(w in {"the", "and", "of", "to", "is", "in", "that"} for w in words) > german


def _without_navigation(text: str) -> str:
    """Drop the lines that the handbook's page template adds."""
    lines = {
        "Download the ebook",
        "Zurück",
        "Weiter",
        "Prev",
        "Next",
        "Das Debian Administrationshandbuch",
        "The Debian Administrator's Handbook",
    }
    return tidy("\n".join(line for line in text.split("\n") if line.strip() not in lines))


def html_pages(source: str, folder: Path, pattern: str) -> Iterator[Document]:
    """Every page in ``folder`` that matches ``pattern``."""
    pages = sorted(folder.glob(pattern))
    if not pages:
        raise CorpusError(f"{folder} has no {pattern}: is {source} installed?")
    for page in pages:
        if page.name.startswith(("ix", "index", "bk", "toc")):
            continue
        text = _without_navigation(html_to_text(page.read_text(errors="replace")))
        if "de" in page.parts or "de-DE" in page.parts or page.name.endswith(".de.html"):
            text = "\n\n".join(p for p in text.split("\n\n") if not _is_english(p))
        if len(text) > 400:
            yield Document(f"{source}/{page.parent.name}/{page.name}", source, text)


def english() -> Iterator[Document]:
    """Modern English: jargon, and Debian's handbook, reference, FAQ and installation guide."""
    yield from jargon()
    yield from html_pages("debian-handbook", DOC / "debian-handbook/html/en-US", "*.html")
    yield from html_pages("debian-reference-en", Path("/usr/share/debian-reference"), "ch*.en.html")
    yield from html_pages("installation-guide-amd64", DOC / "installation-guide-amd64/en", "*.html")
    yield from html_pages("debian-faq", DOC / "debian/FAQ", "*.en.html")


def german() -> Iterator[Document]:
    """The same in German."""
    yield from html_pages("debian-handbook", DOC / "debian-handbook/html/de-DE", "*.html")
    yield from html_pages("debian-reference-de", Path("/usr/share/debian-reference"), "ch*.de.html")
    yield from html_pages("installation-guide-amd64", DOC / "installation-guide-amd64/de", "*.html")
    yield from html_pages("debian-faq-de", DOC / "debian/FAQ/de", "*.de.html")


def package_files(package: str) -> list[Path]:
    """The files of an installed Debian package."""
    out = subprocess.run(["dpkg", "-L", package], capture_output=True, text=True, check=True).stdout
    return [Path(line) for line in out.splitlines() if line.startswith("/")]


def render_manual_page(path: Path) -> str | None:
    """A manual page as left-aligned plain text; None where it only points to another page."""
    source = gzip.open(path, "rb").read()
    if source.startswith(b".so ") or len(source) > MAX_FILE_BYTES:
        return None
    done = subprocess.run(
        ["groff", "-Tutf8", "-mandoc", "-t", "-Kutf8", "-rHY=0", "-rLL=84n", "-dAD=l", "-P-cbou"],
        input=source, capture_output=True, check=False,
    )  # fmt: skip
    lines = done.stdout.decode("utf-8", "replace").strip().splitlines()
    return tidy("\n".join(lines[1:-1]))


def manual() -> Iterator[Document]:
    """Manual pages of the kernel, the C library and its files; C headers of the kernel."""
    for package in ("manpages", "manpages-dev"):
        files = [f for f in package_files(package) if f.suffix == ".gz" and "/man/" in str(f)]
        files = sorted(f for f in files if f.is_file() and not f.is_symlink())
        with concurrent.futures.ThreadPoolExecutor() as pool:
            for path, text in zip(files, pool.map(render_manual_page, files), strict=True):
                if text is not None and len(text) > 300:
                    yield Document(f"{package}/{path.name}", package, text)
    headers = [f for f in package_files("linux-libc-dev") if f.suffix == ".h"]
    for path in sorted(f for f in headers if "/linux/" in str(f) and f.is_file()):
        text = path.read_text(errors="replace")
        if 300 < len(text) < 40_000:
            yield Document(f"linux-libc-dev/{path.name}", "linux-libc-dev", tidy(text))


def python() -> Iterator[Document]:
    """Python's own standard library, without tables and tests."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if PYTHON_LEFT_OUT.intersection(relative.parts) or path.stat().st_size > MAX_FILE_BYTES:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if len(text) > 300:
            yield Document(f"python/{relative}", "python", tidy(text))


READERS = {"bible": bible, "english": english, "manual": manual, "german": german, "python": python}


def missing_packages() -> list[str]:
    """Packages that the corpus needs and that are not installed."""
    if shutil.which("dpkg-query") is None:
        raise CorpusError("this corpus is read from Debian packages, and dpkg-query is not here")
    wanted = sorted({name for names in PACKAGES.values() for name in names})
    missing = []
    for name in wanted:
        done = subprocess.run(
            ["dpkg-query", "-W", "-f", "${db:Status-Status}", name],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.stdout != "installed":
            missing.append(name)
    return missing


def collect(out: Path) -> dict[str, dict[str, int]]:
    """Write every domain under ``out``; returns characters by domain and split."""
    missing = missing_packages()
    if missing:
        raise CorpusError(
            f"missing packages: {', '.join(missing)}\n"
            f"install them with: apt-get install --no-install-recommends {' '.join(missing)}"
        )
    out.mkdir(parents=True, exist_ok=True)
    sizes: dict[str, dict[str, int]] = {}
    for domain in DOMAINS:
        sizes[domain] = {"train": 0, "heldout": 0}
        with open(out / f"{domain}.jsonl", "w", encoding="utf-8") as file:
            for document in READERS[domain]():
                record = {
                    "id": document.id,
                    "source": document.source,
                    "split": document.split,
                    "text": document.text,
                }
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
                sizes[domain][document.split] += len(document.text)
        print(
            f"{domain:8} {sizes[domain]['train']:>10,} characters to train on, "
            f"{sizes[domain]['heldout']:>8,} held out",
            file=sys.stderr,
        )
    return sizes


def read_documents(folder: Path, domain: str, split: str) -> list[dict]:
    """The documents of one domain and split, as ``collect`` wrote them."""
    path = folder / f"{domain}.jsonl"
    if not path.is_file():
        raise CorpusError(f"{path} is missing: run corpus.py first")
    with open(path, encoding="utf-8") as file:
        return [doc for doc in map(json.loads, file) if doc["split"] == split]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to write")
    args = parser.parse_args()
    try:
        collect(args.out)
    except CorpusError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
