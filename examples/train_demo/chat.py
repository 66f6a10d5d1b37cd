"""Turn corpus documents into short question and answer pairs, so that the chat template works.

The answers are always the corpus's own text; only the questions are made up.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator

START, END = "<|im_start|>", "<|im_end|>"
MAX_ANSWER_CHARS = 560


def render(user: str, assistant: str) -> str:
    """One exchange, exactly as the model's chat template writes it."""
    return f"{START}user\n{user}{END}\n{START}assistant\n{assistant}{END}\n"


def _cut(text: str, limit: int, ends: str) -> str:
    """``text`` up to the last of ``ends`` before ``limit`` characters; all of it when short."""
    text = text.strip()
    if len(text) <= limit:
        return text
    at = max(text.rfind(end, 0, limit) + len(end.rstrip()) for end in ends.split("|"))
    return text[:at].strip() if at > limit // 4 else ""


def _continuations(text: str, rng: random.Random, asks: tuple[str, ...]) -> Iterator[tuple]:
    """The start of a sentence as the question, the rest of the passage as the answer."""
    for paragraph in re.split(r"\n+", text):
        words = paragraph.split(" ")
        if len(words) < 12 or len(paragraph) < 80:
            continue
        split = rng.randint(3, min(12, len(words) - 6))
        answer = _cut(" ".join(words[split:]), MAX_ANSWER_CHARS, ". |; |: ")
        if answer:
            yield rng.choice(asks).format(" ".join(words[:split])), answer


def bible(doc: dict, rng: random.Random) -> Iterator[tuple]:
    """A verse or two of a book, or the rest of a verse."""
    title, _, body = doc["text"].partition("\n\n")
    book = title.rsplit(" ", 1)[0]
    verses = body.strip().split("\n")
    for i in range(0, len(verses) - 2, 3):
        yield (
            rng.choice(("A verse from {}.", "Tell me a verse from {}.", "{}")).format(book),
            _cut("\n".join(verses[i : i + 3]), MAX_ANSWER_CHARS, ".\n|. |: "),
        )
    yield from _continuations(body, rng, ("{}", "{}", "Continue: {}"))


def english(doc: dict, rng: random.Random) -> Iterator[tuple]:
    """A definition from the Jargon File, or the rest of a passage."""
    if doc["source"] == "jargon-text":
        entry = r"(?ms)^:([^:\n]{2,40}): (.*?)(?=^:[^:\n]{2,40}: |\Z)"
        for match in re.finditer(entry, doc["text"]):
            term, body = match.groups()
            ask = rng.choice(("What is {}?", "What does {} mean?", "Define {}.", "{}"))
            body = re.sub(r"(?<=\S)\n(?=\S)", " ", body)
            yield ask.format(term), _cut(body, MAX_ANSWER_CHARS, ". |.\n")
    yield from _continuations(
        re.sub(r"(?<=\S)\n(?=\S)", " ", doc["text"]), rng, ("{}", "Continue: {}")
    )


def german(doc: dict, rng: random.Random) -> Iterator[tuple]:
    """The rest of a German passage."""
    yield from _continuations(doc["text"], rng, ("{}", "{}", "Weiter: {}"))


def python(doc: dict, rng: random.Random) -> Iterator[tuple]:
    """A short function for its name, its signature or the first line of its docstring."""
    try:
        tree = ast.parse(doc["text"])
    except SyntaxError:
        return
    lines = doc["text"].split("\n")
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        code = lines[node.lineno - 1 : node.end_lineno]
        indent = len(code[0]) - len(code[0].lstrip())
        code = [line[indent:] for line in code]
        text = "\n".join(code)
        if not 60 <= len(text) <= MAX_ANSWER_CHARS or not code[0].endswith(":"):
            continue
        kind = "function" if isinstance(node, ast.FunctionDef) else "class"
        docstring = (ast.get_docstring(node) or "").split("\n")[0].rstrip(".")
        asks = [(f"Write a Python {kind} named {node.name}.", text), (code[0], text)]
        if 8 < len(docstring) < 80:
            asks.append((f"Write a Python {kind}: {docstring}.", text))
        yield from rng.sample(asks, 1)


def manual(doc: dict, rng: random.Random) -> Iterator[tuple]:
    """The name line and synopsis, or the start of the description, of a manual page."""
    text = doc["text"]
    if not text.startswith("NAME\n"):
        return
    name = doc["id"].split("/")[1].rsplit(".", 2)[0]
    sections = dict(re.findall(r"(?ms)^([A-Z][A-Z ]+)\n(.*?)(?=^[A-Z]|\Z)", text))
    yield f"man {name}", _cut(text, MAX_ANSWER_CHARS, "\n\n")
    what = re.sub(r"\s+", " ", sections.get("NAME", "")).strip()
    about = sections.get("DESCRIPTION", "").strip().split("\n\n")[0]
    about = _cut(re.sub(r"\s+", " ", about), MAX_ANSWER_CHARS, ". ")
    if what and about:
        asks = ("What does {} do?", "What is {}?", "Explain {}.")
        yield rng.choice(asks).format(name), rng.choice((about, f"{what}\n\n{about}"))
    synopsis = sections.get("SYNOPSIS", "").rstrip()
    if synopsis and len(synopsis) < MAX_ANSWER_CHARS:
        yield f"How do I call {name}?", re.sub(r"(?m)^ {7}", "", synopsis).strip()


MAKERS = {"bible": bible, "english": english, "german": german, "python": python, "manual": manual}


def dialogues(domain: str, documents: list[dict], seed: int) -> list[str]:
    """Every exchange that can be made of ``documents``, rendered, in a shuffled order."""
    rng = random.Random(f"{domain}/{seed}")
    made = []
    for doc in documents:
        made += [render(u, a) for u, a in MAKERS[domain](doc, rng) if u.strip() and len(a) > 20]
    rng.shuffle(made)
    return made
