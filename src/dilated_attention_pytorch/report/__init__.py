"""Reports as one file: charts drawn as SVG, and pages of HTML that need nothing from elsewhere."""

from .charts import Series, line_chart
from .page import Page

__all__ = ["Page", "Series", "line_chart"]
