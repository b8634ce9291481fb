"""Shows the reports that saves have left, as one HTML page without network.

It needs no torch. ``robust-dcp report`` calls :func:`read_reports` and :func:`render_page`.
"""

from robust_dcp.report_page.page import render_page
from robust_dcp.report_page.reading import FoundReport, NoReports, Reports, Skipped, read_reports

__all__ = ["FoundReport", "NoReports", "Reports", "Skipped", "read_reports", "render_page"]
