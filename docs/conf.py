"""Sphinx's settings: `sphinx-build -W -b html docs build/site`."""

import lockstep

project = "lockstep"
author = copyright = "The lockstep developers"
release = version = lockstep.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "lockstep"
html_show_sourcelink = False

autodoc_typehints = "none"  # docstrings say it
autodoc_member_order = "bysource"
napoleon_use_ivar = True
