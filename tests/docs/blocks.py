"""The fenced code blocks of a Markdown page, and how each kind of them is run.

| block | what the test does |
|---|---|
| `python` | runs it, in the namespace of the blocks before it |
| `python` that begins with a comment `# name.py` | writes the file |
| `diff` | runs the lines that are there after the change |
| `bash` | runs each command |
| `bash` that begins with `#!` | checks its syntax |
| `console` | runs each `$ command`, and compares the lines below it |
| `text`, `yaml` | nothing here: no code |

Numbers and the order of lines may differ in what a command prints. A line `...` stands for
any lines.
"""

import re
from dataclasses import dataclass

_FENCE = re.compile(
    r"^(?P<fence>```+)(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=fence)\s*$", re.M | re.S
)
_FILE = re.compile(r"# (?P<name>[\w/]+\.py)\b.*\n")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line on which it begins."""

    language: str
    text: str
    line: int

    @property
    def file(self):
        """The file that a Python block is, `None` where it is run."""
        named = _FILE.match(self.text)
        return named["name"] if named and self.language == "python" else None

    @property
    def python(self):
        """The lines to run, of a `python` or a `diff` block."""
        if self.language == "python":
            return self.text
        kept = [line for line in self.text.splitlines() if not line.startswith("-")]
        return "\n".join(line[1:] for line in kept)

    def commands(self):
        """Each command, with the lines that it is to print (`None` for any)."""
        if self.language == "bash":
            lines = self.text.replace("\\\n", " ").splitlines()
            bare = [line.split("   #")[0].strip() for line in lines]
            return [(line, None) for line in bare if line and not line.startswith("#")]
        parts = re.split(r"^\$ ", self.text, flags=re.M)[1:]
        return [(part.split("\n", 1)[0], part.split("\n", 1)[1]) for part in parts]


def blocks(page):
    """The blocks of a page, in order; those of MyST's own (`{toctree}`) are left out."""
    source = page.read_text(encoding="utf-8")
    return [
        Block(found["language"].strip(), found["text"], source[: found.start()].count("\n") + 2)
        for found in _FENCE.finditer(source)
        if not found["language"].startswith("{")
    ]


def same_lines(expected, printed):
    """Whether a command printed each line that a page shows, but for numbers and spaces.

    The order of the lines is not compared: rows of tables are sorted by measured numbers.

    Raises:
        AssertionError: With the line that is missing.
    """
    lines = {_bare(line) for line in printed.splitlines()}
    for line in expected.splitlines():
        if line.strip() not in ("", "..."):
            assert _bare(line) in lines, f"not printed: {line!r}\n{printed}"


def _bare(line):
    without_numbers = re.sub(r"\d+(\.\d+)?(e[-+]\d+)?", "0", line)
    return " ".join(without_numbers.split())
