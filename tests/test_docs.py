# SPDX-License-Identifier: Apache-2.0
"""What the documentation says is true: the paths it names exist, and its Python runs.

Read are README.md, CONTRIBUTING.md, SECURITY.md and docs/*.md. A path is a code span that looks like one (it has a file
suffix, or its first part is a folder here) or the target of a relative link. The ```python blocks of README.md and
docs/*.md run in order, in one namespace per file, in an empty folder. What is exempt is listed here with its reason, and
nothing else is.
"""

from __future__ import annotations

import gc
import itertools
import re
import sys
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from byteback.torchvision_compat import load

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [page for page in (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")) if page.exists()] + DOCS
RUNNABLE = [page for page in PAGES if page.name not in ("CONTRIBUTING.md", "SECURITY.md")]
# Where a path may start: the repository, the package (`ops/activations.py`), or the page's own folder.
BASES = [ROOT, ROOT / "src" / "byteback"]
# A bare file name (`reference.py`) is looked for in these.
FOLDERS = [ROOT / name for name in ("src", "csrc", "docs", "tests", "benchmarks", "examples", "configs")]
SUFFIXES = "py|md|toml|txt|json|csv|cpp|h|hpp|cff|cfg|yml|yaml|sh|ipynb"
NOT_PATHS = {
    "utils.py": "CONTRIBUTING names it to say that there is none",
    "src/byteback/ops/x.py": "CONTRIBUTING: x stands for any room",
    "tests/ops/test_x.py": "CONTRIBUTING: x stands for any room",
    "config.toml": "docs/6-the-trainer.md: a run writes it",
    "predictions.json": "docs/11-deploying.md: byteback predict writes it",
    "detections.json": "docs/7-detection.md: a detector's run writes it",
}
MADE_LATER = (".venv", "runs/", "dist/", "build/", "data/")  # by make, by a run, by a download


class Block(NamedTuple):
    language: str
    line: int  # of its first line of code
    code: str


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a page, also indented ones."""
    fence, start, lines = None, 0, []
    for number, line in enumerate(text.splitlines(), 1):
        mark = re.match(r"(\s*)(```+|~~~+)\s*(\S*)", line)
        if fence is None and mark:
            fence, start, lines = mark, number + 1, []
        elif fence is not None and mark and mark[2].startswith(fence[2]) and not mark[3]:
            yield Block(fence[3], start, "\n".join(lines) + "\n")
            fence = None
        elif fence is not None:
            lines.append(line[len(fence[1]) :] if line.startswith(fence[1]) else line)
    if fence is not None:
        raise ValueError(f"the block that opens on line {start - 1} is never closed")


def prose(text: str) -> Iterator[tuple[int, str]]:
    """The lines outside fenced blocks."""
    inside = {n for block in blocks(text) for n in range(block.line - 1, block.line + block.code.count("\n") + 1)}
    return ((number, line) for number, line in enumerate(text.splitlines(), 1) if number not in inside)


def named_paths(text: str) -> Iterator[tuple[int, str]]:
    """(line, path) for code spans that look like paths and for relative links."""
    for number, line in prose(text):
        for span in re.findall(r"(?<!`)`([^`\s]+)`(?!`)", line):
            if re.fullmatch(r"[\w./*?{},<>\[\]-]+", span) and _looks_like_a_path(span):
                yield number, span
        for target in re.findall(r"\]\(([^)\s]+)\)", line):
            if not re.match(r"[a-z]+:|#", target):
                yield number, target.split("#")[0]


def _looks_like_a_path(span: str) -> bool:
    if re.search(rf"\w\.({SUFFIXES})$", span) or span in ("Makefile", "LICENSE"):
        return True
    # `clip/127` and `int8/float` are no paths; `docs/`, `ops/new` and `tests/nn` are.
    first, slash, _ = span.partition("/")
    return bool(slash) and bool(first) and any((base / first).is_dir() for base in BASES)


def exists(path: str, page: Path) -> bool:
    for spelled in _spellings(path):
        pattern = re.sub(r"<[^>]*>", "*", spelled).rstrip("/")
        found = any(any(base.glob(pattern)) for base in (*BASES, page.parent) if not pattern.startswith(".."))
        found = found or (page.parent / pattern).exists()
        if not found and "/" not in pattern:
            found = any(any(folder.rglob(pattern)) for folder in FOLDERS)
        if not found:
            return False
    return True


def _spellings(path: str) -> list[str]:
    """a_{x,y}.cpp → a_x.cpp, a_y.cpp."""
    parts = [part.strip("{}").split(",") if part.startswith("{") else [part] for part in re.split(r"(\{[^}]*\})", path)]
    return ["".join(choice) for choice in itertools.product(*parts)]


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_there_is_a_readme_and_the_folders_it_speaks_of() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    if "docs/" in readme:
        assert DOCS, "README.md speaks of docs/, but there is no docs/*.md"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_path_it_names_exists(page: Path) -> None:
    missing = [
        f"{page_id(page)}:{line}: `{path}` does not exist"
        for line, path in named_paths(page.read_text(encoding="utf-8"))
        if path not in NOT_PATHS and not path.startswith(MADE_LATER) and not exists(path, page)
    ]
    assert not missing, "\n" + "\n".join(missing)


@pytest.mark.parametrize("path", NOT_PATHS)
def test_every_exemption_is_still_needed(path: str) -> None:
    named = [(page, span) for page in PAGES for _, span in named_paths(page.read_text(encoding="utf-8")) if span == path]
    assert named, f"no page names {path!r} any more; take it out of NOT_PATHS"
    assert not any(exists(span, page) for page, span in named), f"{path!r} exists now; take it out of NOT_PATHS"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_python_is_called_python(page: Path) -> None:
    """A block marked py, py3 or pycon would not run, and nobody would notice."""
    odd = [
        f"{page_id(page)}:{block.line - 1}: ```{block.language}"
        for block in blocks(page.read_text(encoding="utf-8"))
        if block.language != "python" and (block.language.lower().startswith("py") or "python" in block.language.lower())
    ]
    assert not odd, f"write ```python, so that it is run: {odd}"


def run(page: Path, text: str) -> None:
    """Runs the Python of a page; an error names the page's own line."""
    module = types.ModuleType(f"page_{page.stem.replace('-', '_')}")
    sys.modules[module.__name__] = module  # dataclasses look their module up
    try:
        for block in blocks(text):
            if block.language == "python":
                # Blank lines before the code, so that tracebacks count as the page does.
                code = compile("\n" * (block.line - 1) + block.code, str(page), "exec", dont_inherit=True)
                exec(code, vars(module))
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(page)]
        line = frames[-1].lineno if frames else getattr(error, "lineno", "?")
        pytest.fail(f"{page.name}:{line}: {type(error).__name__}: {error}")
    finally:
        del sys.modules[module.__name__]
        vars(module).clear()
        gc.collect()  # a page may define a recipe of its own, which other tests should not find


@pytest.mark.float_table  # a page is read by users, for whom it is in force
@pytest.mark.parametrize("page", RUNNABLE, ids=page_id)
def test_its_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = page.read_text(encoding="utf-8")
    if "torchvision" in text:
        load()  # next to CPU torch a CUDA wheel of torchvision cannot be imported plainly
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    run(page, text)


# ---- the reader itself ----

EXAMPLE = """\
See `src/byteback/ops`, `clip/127`, `no_such.py` and [the guide](docs/none.md#top), not [the web](https://x.org).
```python
x = 1
```
1. indented
   ```python
   assert x == 1
   raise KeyError("nine")
   ```
"""


def test_the_reader_finds_paths_and_blocks() -> None:
    assert list(named_paths(EXAMPLE)) == [(1, "src/byteback/ops"), (1, "no_such.py"), (1, "docs/none.md")]
    assert list(blocks(EXAMPLE)) == [("python", 3, "x = 1\n"), ("python", 7, 'assert x == 1\nraise KeyError("nine")\n')]


def test_the_reader_knows_what_exists() -> None:
    page = ROOT / "README.md"
    for path in ("src/byteback/ops", "ops/activations.py", "activations.py", "src/byteback/{cli,tables}.py", "tests/"):
        assert exists(path, page), path
    for path in ("no_such.py", "ops/no_such.py", "src/byteback/{cli,nothing}.py", "docs/none.md"):
        assert not exists(path, page), path


def test_the_runner_shares_a_namespace_and_names_the_line_that_failed(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"page\.md:8: KeyError: 'nine'"):
        run(tmp_path / "page.md", EXAMPLE)


def test_a_block_that_is_never_closed_is_an_error() -> None:
    with pytest.raises(ValueError, match="line 1 is never closed"):
        list(blocks("```python\nx = 1\n"))
