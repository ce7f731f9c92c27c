"""The report as one page of HTML with plots, and plans for other memory or ranks."""

from dcpc.commands.report.document import html_page
from dcpc.commands.report.needs import Needs, needs, needs_text, remedy_lines
from dcpc.commands.report.plots import draw_plots, overview_png
from dcpc.commands.report.settings import settings_text
from dcpc.commands.report.what_if import (
    crossing_lines,
    degree_crossings,
    what_if,
    what_if_text,
)
