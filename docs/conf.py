"""Sphinx's settings: `sphinx-build -W -b html docs build/site`."""

import re

from docutils import nodes
from sphinx import search
from sphinx.search.en import SearchEnglish
from sphinx.transforms.post_transforms import SphinxPostTransform

import lockstep

project = "lockstep"
author = copyright = "The lockstep developers"
release = version = lockstep.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"lockstep {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
copybutton_prompt_text = "$ "

autodoc_typehints = "none"  # docstrings say it
autodoc_member_order = "bysource"
napoleon_use_ivar = True


class SearchEnglishAndChinese(SearchEnglish):
    """English words, and pairs of Chinese characters: no spaces stand between Chinese words."""

    # Sphinx asks for "var splitQuery" in language_data.js.
    js_splitter_code = r"""
var splitQuery = (query) =>
  (query.match(/[\u4e00-\u9fff]+|[^\W\u4e00-\u9fff]+|[\p{Letter}\p{Number}_]+/gu) || [])
    .flatMap((word) => /^[\u4e00-\u9fff]{3,}$/.test(word)
      ? [...word].slice(1).map((_, at) => word.slice(at, at + 2))
      : [word]);
"""

    def split(self, input: str) -> list[str]:
        """Return the words and the pairs of one text."""
        words = []
        for word in re.findall(r"[\u4e00-\u9fff]+|[^\W\u4e00-\u9fff]+", input):
            pairs = [word[at : at + 2] for at in range(len(word) - 1)]
            words += pairs if "\u4e00" <= word[0] <= "\u9fff" and pairs else [word]
        return words


search.languages["en"] = SearchEnglishAndChinese


class WholeNumbers(SphinxPostTransform):
    """Keep a number such as 1e-5 on one line: word joiners stand around its hyphen."""

    default_priority = 200
    formats = ("html",)

    def run(self, **_) -> None:
        """Change the texts outside of code."""
        for text in list(self.document.findall(nodes.Text)):
            whole = re.sub(r"(?<=\de)-(?=\d)", "\u2060-\u2060", text)
            if whole != text and not isinstance(text.parent, nodes.literal | nodes.literal_block):
                text.parent.replace(text, nodes.Text(whole))


def setup(app) -> None:
    """Add the transform."""
    app.add_post_transform(WholeNumbers)
